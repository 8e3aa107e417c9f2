"""What a mostly frozen model pays for gradients: bytes reduced and bytes held, per rank and step.

    python -m benchmarks.lora --impl fsdp1,fsdp2,fsdp_wrap

A transformer's blocks are frozen save for adapters of about 1 % of their parameters; each block is a unit.
Counted are the bytes that go into reduce-scatters, and the largest gradient memory: what one reduce-scatter
takes in, and the gradients that parameters hold when it is issued.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine, run_ranks
from benchmarks.step import IMPLEMENTATIONS, Transformer, TransformerBlock

RANK = 5


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted_transformer() -> nn.Module:
    """Eight blocks of width 512 with adapters on every linear layer; nothing else trains."""
    model = Transformer(8, 512, 8, 128, 4096).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        for name in ("qkv", "out", "mlp_in", "mlp_out"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


class Gradients(TorchDispatchMode):
    """Watches reduce-scatters: bytes in all, and most gradient memory at any one of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.reduced = 0
        self.held = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "reduce_scatter" in func._schema.name:
            tensors = [t for t in tree_iter(args) if isinstance(t, torch.Tensor)]
            taken = max(t.numel() * t.element_size() for t in tensors)
            self.reduced += taken
            self.held = max(self.held, taken + _gradient_bytes(self._model))
        return result


def _gradient_bytes(model: nn.Module) -> int:
    grads = (param.grad for param in model.parameters() if param.grad is not None)
    local = (getattr(grad, "_local_tensor", grad) for grad in grads)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def measure(implementations: list[str]) -> dict[str, list[int]]:
    """Called on every rank: (bytes reduced, gradient bytes held) of a second step."""
    results = {}
    for name in implementations:
        torch.manual_seed(0)
        model = IMPLEMENTATIONS[name](adapted_transformer())
        tokens = torch.randint(4096, (2, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
        model(tokens).backward()
        model.zero_grad()
        with Gradients(model) as gradients:
            model(tokens).backward()
        results[name] = [gradients.reduced, gradients.held]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient traffic and memory of a mostly frozen model.")
    names: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--impl", type=names, default=["fsdp1", "fsdp2", "fsdp_wrap"], metavar="A,B")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    results = run_ranks(measure, options.ranks, options.impl)
    base = results[options.impl[0]]
    params = list(adapted_transformer().parameters())
    share = sum(p.numel() for p in params if p.requires_grad) / sum(p.numel() for p in params)
    print(f"{json.dumps(machine())}\n{options.ranks} ranks, {share:.1%} of the parameters train\n")
    print(f"{'':14}  reduced KB  / {options.impl[0]:5}  gradients held KB  / {options.impl[0]:5}")
    for name, (reduced, held) in results.items():
        row = f"{name:14}  {reduced / 1e3:10.1f}  {reduced / base[0]:7.4f}"
        print(f"{row}  {held / 1e3:17.1f}  {held / base[1]:7.4f}")


if __name__ == "__main__":
    main()
