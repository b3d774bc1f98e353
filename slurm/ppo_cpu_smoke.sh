#!/usr/bin/env bash
# Does training under this Slurm work? The quickstart's tiny model on CPUs: two nodes, two tasks each.
#
#   sbatch slurm/ppo_cpu_smoke.sh [key.path=value ...]
#
# It checks what a large run needs of the cluster: tasks on two nodes meet, the signal before the
# time limit arrives, the job goes back into the queue and goes on. docs/slurm.md says what to look at.

#SBATCH --job-name=ppo-smoke
# Two nodes, so that ranks have to find each other over the network.
#SBATCH --nodes=2
# Tensor parallel groups of two lie inside a node, pipeline stages on two nodes.
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
# A few minutes are enough; to see a requeue, give less: --time=2.
#SBATCH --time=20
# One minute before the limit, to the batch script alone (B:), which hands it on to the tasks.
#SBATCH --signal=B:USR1@60
# Slurm may start it again, after a node has died or when the script asks for it...
#SBATCH --requeue
# ... and then goes on in the same file. It lies in the folder of the sbatch command: a folder that
# does not exist would end the job without a word.
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: submit it: sbatch $0" >&2; exit 2; }
# Until launch/slurm_job.py takes it, the signal must not end this script.
trap '' USR1

# Slurm runs a copy of this file: the checkout is where the original lies.
original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
for REPO in "${REPO:-}" "$(dirname "$(dirname "$original")")" "$SLURM_SUBMIT_DIR"; do
    [ -f "$REPO/launch/slurm_job.py" ] && break
done
[ -f "$REPO/launch/slurm_job.py" ] ||
    { echo "error: REPO=$REPO: no checkout of rlhf-megatron; give REPO=DIR sbatch ..." >&2; exit 2; }

# The quickstart's model and prompts; made where they are missing.
DATA=${DATA:-data/quickstart}

export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1

# Relative paths start at the checkout.
exec "${HOST_PYTHON:-python3}" "$REPO/launch/slurm_job.py" \
    --config configs/quickstart_cpu.yaml --output-dir runs/ppo_cpu_smoke \
    --prepare "sh -c '[ -d $DATA ] || exec {python} tools/make_quickstart.py --output $DATA'" \
    actor.model="$DATA/model" data.prompts="$DATA/train.jsonl" \
    evaluation.prompts="$DATA/heldout.jsonl" warmup.demonstrations="$DATA/demonstrations.jsonl" \
    run.overwrite=false run.steps=10 warmup.steps=10 \
    rollout.engine=hf rollout.tensor_parallel_size=1 \
    checkpoint.interval_steps=2 \
    "$@"
