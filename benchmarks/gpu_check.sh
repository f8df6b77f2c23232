#!/usr/bin/env bash
# Tests the CUDA kernels on a GPU, then times the ops whose tests are green: about 5 minutes.
#   benchmarks/gpu_check.sh [--quick] [--out FILE.json]
# Needs Python 3.10 to 3.12 with torch, CuPy and pytest; the project need not be installed.
# With mmengine and mmcv, whole backbones go to FILE_backbones.json.
# PYTHON names the interpreter (default: python3). The exit status is that of the tests, or 2
# where nothing could run.
set -euo pipefail

python=${PYTHON:-python3}
out=
quick=()
while (($#)); do
  case $1 in
    --quick) quick=(--quick) ;;
    --out) out=${2:?--out needs a file name}; shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check.sh takes --quick and --out FILE.json, got $1." >&2; exit 2 ;;
  esac
  shift
done

# A relative file name is one of the caller's folder.
out=$(realpath -m -- "${out:-$(dirname "${BASH_SOURCE[0]}")/../work_dirs/gpu_check.json}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$python" - <<'EOF' || exit 2
import sys
from importlib.util import find_spec

missing = [name for name in ('torch', 'cupy', 'pytest') if find_spec(name) is None]
if missing:
    sys.exit(f'gpu_check.sh needs {", ".join(missing)}, which {sys.executable} does not have.')
import torch

if not torch.cuda.is_available():
    sys.exit(f'gpu_check.sh needs a CUDA device, but torch {torch.__version__} sees none.')
EOF

mkdir -p "$(dirname "$out")"
results=${out%.json}_tests.xml
rm -f "$results"
status=0
"$python" -m pytest -m gpu tests/ops -q -p no:cacheprovider --junitxml="$results" || status=$?
"$python" benchmarks/gpu_ops.py --tests "$results" --out "$out" ${quick[@]+"${quick[@]}"}
"$python" benchmarks/gpu_backbones.py --tests "$results" --out "${out%.json}_backbones.json" \
  ${quick[@]+"${quick[@]}"}
exit "$status"
