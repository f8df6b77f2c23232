#!/usr/bin/env bash
# Trains on several GPUs: tools/dist_train.sh CONFIG GPUS [options of tools/train.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT (default 29500).
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG GPUS [options of tools/train.py]" >&2
    exit 2
fi
tools=$(cd "$(dirname "$0")" && pwd)
# PYTHON overrides; else the environment of make demo and make test, else the active one.
python=$tools/../.venv/bin/python
[ -x "$python" ] || python=python
config=$1
gpus=$2
shift 2
exec "${PYTHON:-$python}" -m torch.distributed.run --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$tools/train.py" "$config" --launcher pytorch "$@"
