#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT GPUS [test.py's arguments]
# Several machines: on each, NNODES=2 NODE_RANK=0|1 MASTER_ADDR=... PORT=... dist_test.sh CONFIG CHECKPOINT GPUS_PER_MACHINE
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
fi
CONFIG=$1
CHECKPOINT=$2
GPUS=$3
exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$GPUS" \
    "$(dirname "$0")/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "${@:4}"
