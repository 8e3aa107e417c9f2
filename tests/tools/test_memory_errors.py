"""Errors for lack of memory tell what the units held, wherever in a step memory runs out."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import either_front, shard
from fsdp_wrap import explain_memory_errors
from fsdp_wrap._core import format_bytes
from fsdp_wrap._params import BatchedGather, BatchedGradients, Buffers, UnitGradients
from fsdp_wrap.tools.memory import is_for_memory, planned_memory
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 256
FULL = (WIDTH * WIDTH + WIDTH) * 4
HELD = format_bytes(FULL)


class Fails(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


class Layer(nn.Module):
    """A unit that does what it is told beside computing."""

    def __init__(self):
        super().__init__()
        self.linear, self.then = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        y = self.linear(x)
        return y if self.then is None else self.then(y)


def _model(front, **options):
    plain = [Layer() for _ in range(3)]
    layers = nn.Sequential(*plain)
    return shard(front, layers, ModuleWrapPolicy({Layer}), **options), plain


def _lines(error):
    return str(error.value).splitlines()


@either_front
@ranks(2)
def test_forwards_tell(rank, world_size, front):
    (model, layers), x = _model(front), torch.randn(2, WIDTH)

    layers[1].then = lambda y: y + torch.empty(1 << 60, dtype=torch.uint8).sum()
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        model(x)
    first = next(n for n, line in enumerate(_lines(error)) if line.startswith("The units of the model held"))
    head, whole, *units = _lines(error)[first:]
    assert head == f"The units of the model held then (rank {rank}, in the forward of unit '1'):"
    shards = format_bytes(3 * FULL / world_size)
    assert whole == (
        f"  {HELD} of full parameters in 1 of 3 units, 0 B of gradients on their way, {shards} of shards"
    )
    assert units == [f"  unit '1': unsharded, {HELD} of full parameters"]
    assert str(error.value).count("The units of the model held") == 1  # and not once more by the root
    layers[1].then = lambda y: (_ for _ in ()).throw(MemoryError("no memory"))
    with mock.patch.object(planned_memory, "filled", lambda units: [f"  planned for {len(units)} units"]):
        with pytest.raises(MemoryError) as told:
            model(x)
    assert _lines(told)[0] == "no memory" and _lines(told)[-1] == "  planned for 4 units"
    layers[1].then = None
    model(x).sum().backward()  # the model is usable


@either_front
@ranks(2)
def test_backwards_tell(rank, world_size, front):
    x = torch.randn(2, WIDTH)
    for together, owners in (
        (0, ((Buffers, "gather"), (UnitGradients, "reduce"))),
        (WIDTH**4, ((BatchedGather, "issue"), (BatchedGradients, "reduce"))),
    ):
        model, _ = _model(front, travel_together_bytes=together)
        for _ in range(2):
            model(x).sum().backward()
        for owner, verb in owners:
            exhausted = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            output = model(x).sum()
            with mock.patch.object(owner, verb, side_effect=exhausted):
                with pytest.raises(torch.OutOfMemoryError) as error:
                    output.backward()
            assert error.value is exhausted
            first, head, whole, *_ = _lines(error)
            assert first == "CUDA out of memory. Tried to allocate 2 GiB"
            assert head.startswith(f"The units of the model held then (rank {rank}, in ")
            assert together or head.endswith("in a backward):")
            assert "of shards" in whole
        model(x).sum().backward()


@either_front
@ranks(1)
def test_operators_of_a_backward_tell_in_the_context(rank, world_size, front):
    (model, layers), x = _model(front), torch.randn(2, WIDTH)
    mistaken = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    layers[1].then = lambda y: (_ for _ in ()).throw(mistaken)
    with pytest.raises(RuntimeError) as other, explain_memory_errors(model):
        model(x)
    assert other.value is mistaken and str(other.value) == "mat1 and mat2 shapes cannot be multiplied"
    layers[1].then = Fails.apply
    with pytest.raises(MemoryError) as error:
        model(x).sum().backward()
    assert str(error.value) == ""
    with pytest.raises(MemoryError) as error, explain_memory_errors(model):
        model(x).sum().backward()
    assert _lines(error)[0] == "MemoryError" and "in the backward of unit '1'" in _lines(error)[1]
    assert any(line.startswith("  unit '1': unsharded") for line in _lines(error))
    with pytest.raises(ValueError, match=r"pass explain_memory_errors\(\) the model"):
        explain_memory_errors(Layer()).__enter__()


def test_which_errors_are_for_memory():
    enforced = RuntimeError("[enforce fail] can't allocate memory: 1 bytes")
    yes = MemoryError(), torch.OutOfMemoryError("x"), enforced
    no = RuntimeError("device-side assert"), ValueError("out of memory"), KeyError("memory")
    assert all(map(is_for_memory, yes)) and not any(map(is_for_memory, no))
