#!/usr/bin/env bash
# slurm_train.sh PARTITION JOB_NAME CONFIG [WORK_DIR] [train.py's arguments]
# Submits a job that Slurm puts back into the queue when its machine fails or is taken away, and that then goes on from its
# latest checkpoint; REQUEUE=0, or within an allocation (salloc, a batch script of yours): srun at once, in the foreground.
# Set by variables: GPUS=8 in all, GPUS_PER_NODE=8, CPUS_PER_TASK=5, GRES=gpu:8 on each machine (empty: none),
# SBATCH_ARGS and SRUN_ARGS: more options for sbatch (--time, --account, ...) and srun.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
fi
PARTITION=$1
JOB_NAME=$2
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GRES=${GRES-gpu:$GPUS_PER_NODE}
if [ $# -gt 3 ] && [ "${4#-}" = "$4" ]; then
    set -- "$1" "$2" "$3" --work-dir "${@:4}"
fi
BATCH=1
if [ "${REQUEUE:-1}" = 0 ] || [ -n "${SLURM_JOB_ID:-}" ]; then
    BATCH=0
fi
for COMMAND in srun $([ "$BATCH" = 0 ] || echo sbatch); do
    if ! command -v "$COMMAND" > /dev/null; then
        echo "error: $COMMAND is not on the PATH: this needs a cluster with Slurm. Without one use tools/dist_train.sh." >&2
        exit 1
    fi
done
RESOURCES=(--partition="$PARTITION" --job-name="$JOB_NAME" --ntasks="$GPUS" --ntasks-per-node="$GPUS_PER_NODE"
    --cpus-per-task="${CPUS_PER_TASK:-5}" ${GRES:+--gres="$GRES"})
# shellcheck disable=SC2206  # options, split at spaces
RUN=(srun "${RESOURCES[@]}" --kill-on-bad-exit=1 ${SRUN_ARGS:-}
    python -u "$(cd "$(dirname "$0")" && pwd)/train.py" "$3" --launcher slurm --resume "${@:4}")
if [ "$BATCH" = 0 ]; then
    exec "${RUN[@]}"
fi
# shellcheck disable=SC2086
exec sbatch --requeue --open-mode=append "${RESOURCES[@]}" ${SBATCH_ARGS:-} --wrap "exec $(printf '%q ' "${RUN[@]}")"
