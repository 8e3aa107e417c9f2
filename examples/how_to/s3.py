"""Save to S3: the program behind `docs/how-to/s3.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/s3.py`. Without AWS_ENDPOINT_URL it starts a server of
its own, by moto, which lasts as long as the program.
"""

import logging
import os
import urllib.request

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width=32, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def started():
    """Starts a server with an empty bucket on the first rank, and returns its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{address}/my-bucket", method="PUT")).close()
    return address


if "AWS_ENDPOINT_URL" not in os.environ:
    address = [started() if rank == 0 else None]
    dist.broadcast_object_list(address, src=0)
    os.environ.update(AWS_ENDPOINT_URL=address[0], AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")

torch.manual_seed(0)
model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

from fsdp_wrap import checkpoint

runs = "s3://my-bucket/lm"
first = 1
if checkpoint.latest(runs):
    first = checkpoint.load(runs, model, optimizer).step + 1
for step in range(first, 21):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        checkpoint.save(runs, model, optimizer, step=step, keep_last=3)

pending = checkpoint.async_save(runs, model, optimizer, step=30)
# Training goes on here: everything has been copied.
folder = pending.result()  # before destroy_process_group(); raises if saving failed

print(folder)  # s3://my-bucket/lm/step_00000030.0001c53b67
checkpoint.load(folder, model, optimizer)

checkpoint.load(runs, model, optimizer, cache="cache/lm")

import fsspec

fsspec.config.conf["s3"] = {"max_concurrency": 4, **fsspec.config.conf.get("s3", {})}

checkpoint.export_safetensors(model, "s3://my-bucket/weights")
checkpoint.import_safetensors(model, "s3://my-bucket/weights")

assert checkpoint.latest(runs) == folder
assert len(fsspec.filesystem("s3").ls("my-bucket/lm")) == 3

dist.barrier()
dist.destroy_process_group()
