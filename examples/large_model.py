"""Load a model that is larger than the memory of a rank, from safetensors through the meta device.

    torchrun --nproc-per-node 2 examples/large_model.py runs/large

Each rank builds the model on the meta device, where tensors have shapes but no memory. It then reads its own
shard of every weight, and the forward gathers one layer at a time. So no rank needs memory for the whole
model. The example first writes the weights, layer by layer, instead of downloading them.

Prints:

    the weights have 268 MB, of which this rank keeps 134 MB
    to load and run the model took 66 % of that memory
    the outputs are those of the layers one by one
"""

import argparse
import json
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_wrap import checkpoint, fully_shard

WIDTH, LAYERS = 1024, 64


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def write_weights(folder: Path) -> None:
    """Stands for a download: a file for each layer, and the index that Hugging Face's libraries write."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{layer}.weight": f"model-{layer:05}.safetensors" for layer in range(LAYERS)}
    torch.manual_seed(0)
    for name, file in files.items():
        save_file({name: (torch.rand(WIDTH, WIDTH) - 0.5) * (12 / WIDTH) ** 0.5}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


class Peak(threading.Thread):
    """Looks a hundred times a second at how much memory of its own this process has, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.before = self.highest = self.now()

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.highest = max(self.highest, self.now())

    def growth(self) -> int:
        self.done.set()
        self.join()
        return self.highest - self.before

    @staticmethod
    def now() -> int:
        """Without the pages of files, which Linux can take back: what is its own, and what ranks share."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(status[kind].split()[0]) for kind in ("RssAnon", "RssShmem")) // 1000


def layer_by_layer(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """Computes the same without any model, from the files."""
    for file in sorted(folder.glob("*.safetensors")):
        (weight,) = load_file(file).values()
        x = nn.functional.linear(x, weight)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a model that is larger than what a rank takes for it.")
    parser.add_argument("folder", type=Path, help="where the weights are, or will be written")
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not folder.exists():
        write_weights(folder)
    dist.barrier()

    peak = Peak()
    peak.start()
    with torch.device("meta"):  # shapes, and no memory
        model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")  # this rank's part
    checkpoint.import_safetensors(model, folder)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        y = model(x)
    took = peak.growth()

    torch.testing.assert_close(y, layer_by_layer(folder, x))
    if rank == 0:
        whole = sum(param.nbytes for param in model.parameters()) // 10**6
        kept = sum(param.to_local().nbytes for param in model.parameters()) // 10**6
        print(f"the weights have {whole} MB, of which this rank keeps {kept} MB")
        print(f"to load and run the model took {100 * took / whole:.0f} % of that memory")
        print("the outputs are those of the layers one by one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
