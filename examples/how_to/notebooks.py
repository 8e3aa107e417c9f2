"""Train from a notebook: the cells of `docs/how-to/notebooks.md`.

Run it by `python examples/how_to/notebooks.py`.
"""

import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))


def train(folder, steps):
    import torch.distributed as dist

    from fsdp_wrap import checkpoint, fully_shard

    torch.set_num_threads(1)  # OpenMP's other threads do not survive the fork
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank())
    model = make_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    torch.manual_seed(dist.get_rank())  # other batches on other ranks
    for _ in range(steps):
        loss = model(torch.randn(8, 32, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.3f}", flush=True)
    checkpoint.save(folder, model, optimizer, step=steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    from accelerate import notebook_launcher

    free_port = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    notebook_launcher(train, args=("runs/notebook", 3), num_processes=2, **free_port)

    from fsdp_wrap import checkpoint

    model = make_model()
    checkpoint.load("runs/notebook", model)

    def train_as_rank(rank, world_size, port, folder, steps):
        import os

        launched = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }
        os.environ.update({name: str(value) for name, value in launched.items()})
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
        train(folder, steps)

    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]  # a free one
    mp.start_processes(train_as_rank, args=(2, port, "runs/forked", 3), nprocs=2, start_method="fork")

    forked = make_model()
    checkpoint.load("runs/forked", forked)
    for param, expected in zip(model.parameters(), forked.parameters(), strict=True):
        assert torch.equal(param, expected)
