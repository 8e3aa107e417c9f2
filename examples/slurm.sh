#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out

# Starts a program on all hosts of a Slurm job, one torchrun on each, one rank for each GPU:
#     sbatch examples/slurm.sh examples/train_lm.py --checkpoint /shared/runs/lm
# Without srun it starts this host's part by itself.
set -euo pipefail

ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
first=$SLURM_JOB_NODELIST
if command -v scontrol > /dev/null; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${hosts[0]}
fi
launch=(torchrun
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks"
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))"
    "$@")
if command -v srun > /dev/null; then
    launch=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${launch[@]}")
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-$ranks} / ranks))}
exec "${launch[@]}"
