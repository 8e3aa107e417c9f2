"""bitsandbytes' 4-bit weights below our front-ends and torch's: difference to a plain model, and bytes.

    pip install -e '.[bitsandbytes]' && torchrun --nproc-per-node 2 -m benchmarks.four_bit

It prints a table in Markdown. For each storage and front-end it has the largest difference of one output to
that of the plain model, the bytes of 4-bit codes and of their scales that a rank has at rest, and the bytes
of codes that a forward gathers. Figures are those of nf4 and fp4, quantised twice and once; only the scales
differ between these. 64 weights share a scale. The shared memory of ranks on one host is off.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard

WIDTH, LAYERS = 512, 4
STORAGES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}


class Layer(nn.Module):
    """A frozen 4-bit matrix with a norm and an adapter that train."""

    def __init__(self, kind: str, storage: torch.dtype, twice: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"quant_type": kind, "quant_storage": storage, "compress_statistics": twice}
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.back = nn.Linear(8, WIDTH, bias=False)
        self.matrix = Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.matrix(normed) + self.back(self.into(normed))


def model_of(kind: str, storage: torch.dtype, twice: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind, storage, twice) for _ in range(LAYERS))).to("cpu")


def wrapped(kind: Any, model: nn.Sequential, **options: Any) -> nn.Module:
    for index, layer in enumerate(model):
        model[index] = kind(layer, **options)
    return kind(model, **options)


def composed(function: Any, model: nn.Sequential, **options: Any) -> nn.Module:
    for layer in model:
        function(layer, **options)
    return function(model, **options)


OURS: dict[str, Any] = {"shared_memory": False}
CPU: dict[str, Any] = {"device_id": torch.device("cpu")}
WAYS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "FSDP, flat": lambda model: wrapped(FSDP, model, **OURS),
    "FSDP, use_orig_params": lambda model: wrapped(FSDP, model, use_orig_params=True, **OURS),
    "fully_shard": lambda model: composed(fully_shard, model, **OURS),
    "torch's FSDP, flat": lambda model: wrapped(torch_fsdp.FullyShardedDataParallel, model, **CPU),
    "torch's FSDP, use_orig_params": lambda model: wrapped(
        torch_fsdp.FullyShardedDataParallel, model, use_orig_params=True, **CPU
    ),
    "torch's fully_shard": lambda model: composed(torch_fsdp.fully_shard, model),
}


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that come out of gathers on this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func.name():
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(args[0]))
        return func(*args, **(kwargs or {}))


def at_rest(model: nn.Module, plain: nn.Module) -> tuple[int, int]:
    """Returns the bytes of this rank's codes, and of the scales."""
    matrices = [module for module in model.modules() if isinstance(module, Linear4bit)]
    scales = [matrix.quant_state for matrix in matrices]
    of_scales = sum(
        tensor.numel() * tensor.element_size()
        for state in scales
        for tensor in state.as_dict().values()
        if isinstance(tensor, torch.Tensor)
    )
    total = sum(shard.numel() * shard.element_size() for shard in _shards(model))
    return total - beside(plain) // dist.get_world_size(), of_scales


def beside(plain: nn.Module) -> int:
    """Returns the bytes of all parameters that are not in 4 bits."""
    others = (param for name, param in plain.named_parameters() if not name.endswith("matrix.weight"))
    return sum(param.numel() * param.element_size() for param in others)


def _shards(model: nn.Module) -> Iterator[torch.Tensor]:
    for param in model.parameters():
        yield param.to_local() if hasattr(param, "to_local") else param.detach()


@dataclass
class Figures:
    """Of all kinds of weights in one storage below one front-end."""

    differs: float
    codes: int
    scales: tuple[int, ...]
    gathered: int


def figures(storage: str, way: str) -> Figures:
    """Measures all kinds, of which the largest figures count."""
    rows: list[tuple[float, int, int, int]] = []
    for kind, twice in itertools.product(("nf4", "fp4"), (True, False)):
        plain, x = model_of(kind, STORAGES[storage], twice), torch.randn(4, WIDTH)
        model = WAYS[way](model_of(kind, STORAGES[storage], twice))
        codes, scales = at_rest(model, plain)
        with Received() as received:
            output = model(x)
        rows.append(((output - plain(x)).abs().max().item(), codes, scales, received.bytes - beside(plain)))
    differs, codes_of, scales_of, gathered = zip(*rows)
    return Figures(max(differs), max(codes_of), tuple(sorted(set(scales_of))), max(gathered))


def row(storage: str, way: str) -> str:
    try:
        told = figures(storage, way)
    except ValueError as error:
        return f"| {storage} | {way} | refused: {str(error).split(' but')[0]} | | | |"
    scales = " or ".join(f"{number:,}" for number in told.scales)
    return f"| {storage} | {way} | {told.differs:.1f} | {told.codes:,} | {scales} | {told.gathered:,} |"


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    lines = [
        "| storage | front-end | difference | codes | scales | gathered |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [row(storage, way) for storage in STORAGES for way in WAYS]
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
