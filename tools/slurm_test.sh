#!/usr/bin/env bash
# slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [test.py's arguments]
# Set by variables: GPUS=8 in all, GPUS_PER_NODE=8, CPUS_PER_TASK=5, GRES=gpu:8 on each machine (empty: none),
# SRUN_ARGS: more options for srun (--time, --account, ...).
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GRES=${GRES-gpu:$GPUS_PER_NODE}
if ! command -v srun > /dev/null; then
    echo "error: srun is not on the PATH: this needs a cluster with Slurm. Without one use tools/dist_test.sh." >&2
    exit 1
fi
# shellcheck disable=SC2086  # options, split at spaces
exec srun --partition="$1" --job-name="$2" --ntasks="${GPUS:-8}" --ntasks-per-node="$GPUS_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" ${GRES:+--gres="$GRES"} --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    python -u "$(cd "$(dirname "$0")" && pwd)/test.py" "$3" "$4" --launcher slurm "${@:5}"
