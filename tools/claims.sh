#!/usr/bin/env bash
# Every command behind docs/claims, one after the other; trainings that are finished are kept.
#   tools/claims.sh [--out DIR] [--fast] [--seed N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# OpenMP's threads spin for each other; see tools/demo.sh.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"

readonly commands=(
  qk_distances kernel_gradients convergence kernel_scale normalization detector_convergence
  injectivity solvers complexity landmark_grids high_resolution attention_maps
)

for i in "${!commands[@]}"; do
  printf '==> [%d/%d] %s\n' $((i + 1)) ${#commands[@]} "${commands[i]}"
  .venv/bin/python "tools/analysis/${commands[i]}.py" "$@"
done
