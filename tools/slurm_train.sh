#!/usr/bin/env bash
# Trains under Slurm: tools/slurm_train.sh PARTITION JOB CONFIG WORK_DIR [options of tools/train.py]
# GPUS (default 8), GPUS_PER_NODE (default 8 or GPUS, the smaller), CPUS_PER_TASK (default 5) and
# SRUN_ARGS (more options of srun) come from the environment.
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: $0 PARTITION JOB CONFIG WORK_DIR [options of tools/train.py]" >&2
    exit 2
fi
tools=$(cd "$(dirname "$0")" && pwd)
# PYTHON overrides; else the environment of make demo and make test, else the active one.
python=$tools/../.venv/bin/python
[ -x "$python" ] || python=python
partition=$1
job=$2
config=$3
work_dir=$4
shift 4
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
if [ $((gpus % gpus_per_node)) -ne 0 ]; then
    echo "error: GPUS must be a multiple of GPUS_PER_NODE=$gpus_per_node, got $gpus" >&2
    exit 2
fi
# One task a GPU. SRUN_ARGS is split into words on purpose.
# shellcheck disable=SC2086
exec srun --partition="$partition" --job-name="$job" --nodes="$((gpus / gpus_per_node))" \
    --ntasks="$gpus" --ntasks-per-node="$gpus_per_node" --gres="gpu:$gpus_per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-$python}" -u "$tools/train.py" "$config" --work-dir "$work_dir" --launcher slurm "$@"
