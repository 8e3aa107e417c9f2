"""Train on two ranks, resume on another number of ranks, and export the weights.

    torchrun --nproc-per-node 2 examples/resume_elsewhere.py runs/moved --steps 20
    torchrun --nproc-per-node 3 examples/resume_elsewhere.py runs/moved --steps 40 --export runs/exported

The second run loads the checkpoint of the first: model, optimizer and learning rate. All ranks together see
96 samples per step, so the losses are those of an uninterrupted run. The export is a folder of safetensors,
which a plain model loads.

The second command prints:

    loaded step 20 on 3 ranks
    step 30: loss 0.0932
    step 40: loss 0.0753
    exported 6 tensors, from which a plain model computes the same
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from fsdp_wrap.wrap import NameWrapPolicy

SAMPLES = 96


def make_net() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def batch_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's samples of a step: points of the plane, and the values of a function there."""
    points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(step))[rank::ranks]
    return points, torch.sin(6 * points[:, :1]) * points[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains, resumes on any number of ranks, and exports.")
    parser.add_argument("folder", type=Path, help="where checkpoints are saved and looked for")
    parser.add_argument("--steps", type=int, required=True, help="the last step")
    parser.add_argument("--export", type=Path, help="write the weights there as safetensors")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if SAMPLES % ranks:
        parser.error(f"{SAMPLES} samples a step cannot be dealt to {ranks} ranks alike")
    model = FSDP(make_net(), auto_wrap_policy=NameWrapPolicy("Linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)

    first, extra = 1, {"scheduler": scheduler}
    if checkpoint.latest(options.folder):
        first = checkpoint.load(options.folder, model, optimizer, extra).step + 1
        if rank == 0:
            print(f"loaded step {first - 1} on {ranks} ranks", flush=True)
    for step in range(first, options.steps + 1):
        points, values = batch_of(step, rank, ranks)
        loss = (model(points) - values).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
    checkpoint.save(options.folder, model, optimizer, extra, step=options.steps, keep_last=2)

    if options.export:
        checkpoint.export_safetensors(model, options.export)
        plain = make_net()
        checkpoint.import_safetensors(plain, options.export)
        points, _ = batch_of(0, 0, 1)
        with torch.no_grad():
            torch.testing.assert_close(plain(points), model(points))
        if rank == 0:
            tensors = len(plain.state_dict())
            print(f"exported {tensors} tensors, from which a plain model computes the same", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
