#!/usr/bin/env bash
# Evaluates on several GPUs: tools/dist_test.sh CONFIG CHECKPOINT GPUS [options of tools/test.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT (default 29500).
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [options of tools/test.py]" >&2
    exit 2
fi
tools=$(cd "$(dirname "$0")" && pwd)
# PYTHON overrides; else the environment of make demo and make test, else the active one.
python=$tools/../.venv/bin/python
[ -x "$python" ] || python=python
config=$1
checkpoint=$2
gpus=$3
shift 3
exec "${PYTHON:-$python}" -m torch.distributed.run --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$tools/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
