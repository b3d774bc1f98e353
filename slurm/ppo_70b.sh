#!/usr/bin/env bash
# PPO of a 70B model on 8 nodes of 8 H100 (80 GB) or more.
#
#   sbatch slurm/ppo_70b.sh actor.model=/shared/llama-70b data.prompts=/shared/prompts.jsonl \
#       reward.function=/shared/rewards.py:score
#
# What a job does, what its end means and what to do then: docs/slurm.md. Before GPUs are asked for:
#   python launch/train.py --config configs/ppo_70b_64gpu.yaml --dry-run --world-size 64 ...

#SBATCH --job-name=ppo-70b
# 64 ranks. Actor and critic take 18 bytes a parameter (weights, gradients, master weights, moments),
# 2.5 TB in all: 43 GB a rank, which leaves the rest for vLLM. On 4 nodes training state has to lie in
# host memory, with another configuration (docs/slurm.md). More:
# multiples of 8; each 8 add a data-parallel replica, no key changes: sbatch --nodes=16 slurm/...
# How the layout divides the ranks, and why, opens the configuration.
#SBATCH --nodes=8
# One task per GPU, started by srun: signals and exit codes pass between Slurm and the ranks. One
# torchrun per node would turn each exit code into 1, and kill the ranks 30 s after a signal.
# 8 of them: tensor-parallel groups and vLLM engines of 8 lie inside a node, on NVLink.
#SBATCH --ntasks-per-node=8
# All GPUs of a node for all its tasks: with --gpus-per-task each would see one alone, without NVLink.
#SBATCH --gpus-per-node=8
# Data, tokenizer and checkpoint writers of a rank. A DGX H100 has 112 cores: up to 14.
#SBATCH --cpus-per-task=12
# Whole nodes, with all their memory: the reference and sleeping engines live in host memory.
#SBATCH --exclusive
#SBATCH --mem=0
# A requeued job waits in the queue again: take what starts soon where you are. State is saved every
# 30 minutes and before the limit.
#SBATCH --time=24:00:00
# 20 minutes before the limit, to the batch script alone (B:), which hands it on to the tasks: for the
# rest of a step, and 2 TB of checkpoint. Slurm may be a minute early.
#SBATCH --signal=B:USR1@1200
# Slurm may start it again, after a node has died or when the script asks for it...
#SBATCH --requeue
# ... and then goes on in the same file. It lies in the folder of the sbatch command: a folder that
# does not exist would end the job without a word.
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
# Your cluster may want these; also on the command line, before the script's name.
##SBATCH --partition=...
##SBATCH --account=...

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

# Megatron-Core: with sequence parallelism, collectives have to be queued before the kernels that
# they overlap with.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Not set, and not to be: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. vLLM
# before 0.25 refuses it in its sleep mode, 0.25.1 turns it off for itself.
unset PYTORCH_CUDA_ALLOC_CONF
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
# Where ranks do not find each other, name the interface of the nodes' common network:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# Relative paths start at the checkout.
exec "${HOST_PYTHON:-python3}" "$REPO/launch/slurm_job.py" \
    --config configs/ppo_70b_64gpu.yaml --output-dir runs/ppo_70b \
    "$@"
