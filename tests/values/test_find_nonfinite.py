"""`find_nonfinite` names rank, unit, module, phase and index of the first value that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import apart
from bed import ranks
from fronts import chosen, each_front, inner, no_sync, shard, shard_columns
from fsdp_wrap import (
    CPUOffload,
    MixedPrecision,
    NonFiniteError,
    ShardingStrategy,
    find_nonfinite,
    reproducible,
)
from fsdp_wrap._core import PlugIn, ValueSeam, everywhere
from fsdp_wrap._values.looks import Looks, Origin, Spot
from fsdp_wrap._values.pieces import activations
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects
from nets import WIDTH, Block, Checkpointing, Net

NAN, INF = float("nan"), float("inf")
CULPRIT = 1
"""The rank at which values are spoilt."""


class Spoiled(nn.Module):
    """Passes a tensor on, or spoils it or its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spoils: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x):
        return x if self.spoils is None else self.spoils(x)


class SpoiledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.between = Spoiled()

    def forward(self, x):
        return x + self.down(self.between(torch.tanh(self.up(x))))


class SpoiledNet(Net):
    block = SpoiledBlock


class CheckpointedNet(Checkpointing, SpoiledNet):
    pass


class ReentrantNet(CheckpointedNet):
    reentrant = True


def made(front: str = "orig", net: type[nn.Module] = SpoiledNet, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(front, net(), ModuleWrapPolicy({SpoiledBlock}), **options)


def step(model: nn.Module, optimizer: Any, spoils: Callable[[], Any] = lambda: None) -> None:
    if dist.get_rank() == CULPRIT:
        spoils()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def error_of(model: nn.Module, spoils: Callable[..., Any], **options: Any) -> NonFiniteError:
    """Returns the error of the step that is spoilt, the same on all ranks; the model trains afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step(model, optimizer)
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model, **options):
        step(model, optimizer)
        step(model, optimizer, partial(spoils, model))
    told = gather_objects(str(caught.value))
    assert len(set(told)) == 1, told
    optimizer.zero_grad()
    inner(inner(model).blocks[1]).between.spoils = None
    if caught.value.first.phase not in ("parameter", "update"):
        with find_nonfinite(model):
            step(model, optimizer)
    return caught.value


def place(error: NonFiniteError) -> tuple[int, str, str, str]:
    first = error.first
    return first.rank, first.phase, first.unit, first.module


@ranks(2)
def test_the_index_in_a_parameter_that_is_cut_by_columns(rank, world_size):
    net = SpoiledNet()
    model = shard_columns(net, net.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        if rank == CULPRIT:
            net.blocks[1].up.weight.grad.to_local()[2, 1] = NAN
        optimizer.step()
    first = caught.value.first
    assert (first.rank, first.phase, first.module) == (CULPRIT, "update", "blocks.1.up")
    assert (first.index, first.shape, first.nan) == ((2, WIDTH // 2 + 1), (5, WIDTH), 1)


def spoil_output(value: float, model: nn.Module) -> None:
    def spoils(x):
        x = x.clone()
        x[1, 2] = value
        return x

    inner(inner(model).blocks[1]).between.spoils = spoils


class SpoiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.index_fill(0, torch.tensor(1), NAN)


def spoil_gradient(model: nn.Module) -> None:
    inner(inner(model).blocks[1]).between.spoils = SpoiledBackward.apply


@ranks(2)
@pytest.mark.parametrize("front, modules", [("flat", True), ("composable", True), ("orig", False)])
def test_what_a_module_makes_is_named(rank, world_size, front, modules):
    error = error_of(made(front), partial(spoil_output, INF), modules=modules)
    module = "blocks.1.between" if modules else "blocks.1"
    assert place(error) == (CULPRIT, "output", "blocks.1", module) and error.first.made
    if modules:
        first = error.first
        assert (first.index, first.shape, first.nan, first.inf) == ((1, 2), (4, 5), 0, 1)
        assert abs(first.least) <= 1 and abs(first.largest) <= 1 and len(first.before) > 2
        text = (
            "'blocks.1.between' of unit 'blocks.1', phase output: the output has 0 NaN and 1 infinite of 20"
        )
        assert text in str(error) and "the first at [1, 2]" in str(error) and "Made here" in str(error)


@ranks(2)
@pytest.mark.parametrize("modules", [True, False])
def test_what_a_backward_makes_is_named(rank, world_size, modules):
    error = error_of(made(), spoil_gradient, modules=modules)
    assert error.first.rank == CULPRIT and error.first.unit == "blocks.1" and error.first.made
    phase, module = error.first.phase, error.first.module
    expected = ("gradient of input", "blocks.1.between" if modules else "blocks.1")
    assert (phase, module) == expected
    assert [(other.rank, other.phase) for other in error.also] == [(1 - CULPRIT, "reduced gradient")]


class Spoiler(PlugIn):
    """Spoils one element at a seam of a unit, before others look."""

    order = -1

    def __init__(self, seam: ValueSeam, unit: str) -> None:
        self._seam, self._unit, self.done = seam, unit, False

    def sees(self, owner: Any, seam: ValueSeam, values: Any) -> None:
        if self.done or seam is not self._seam:
            return
        if seam is ValueSeam.REDUCED:
            if "up.weight" in owner.layout.fqns:
                self.done = True
                values[0].view(-1)[8] = NAN  # not in a gap between parameters
        elif owner.fqn == self._unit:
            self.done = True
            leaf = owner.buffers.segments[0].leaves[0]
            (leaf.grad if seam is ValueSeam.GRADIENTS else leaf.data).view(-1)[3] = NAN


@contextmanager
def spoiling(seam: ValueSeam, unit: str = "blocks.1") -> Iterator[None]:
    spoiler = Spoiler(seam, unit)
    everywhere.attach(spoiler)
    try:
        yield
    finally:
        everywhere.detach(spoiler)
    assert spoiler.done


@ranks(2)
@each_front
def test_what_comes_between_computations_is_named(rank, world_size, front):
    for seam in (ValueSeam.GRADIENTS, ValueSeam.PARAMETERS, ValueSeam.REDUCED):
        model = made(front)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with (
            pytest.raises(NonFiniteError) as caught,
            spoiling(seam) if rank == CULPRIT else nullcontext(),
            find_nonfinite(model),
        ):
            step(model, optimizer)
        layer = "down" if seam is ValueSeam.REDUCED and front != "composable" else "up"
        assert place(caught.value) == (CULPRIT, seam.value, "blocks.1", f"blocks.1.{layer}")
        assert caught.value.first.made is (seam is not ValueSeam.PARAMETERS)


@ranks(2)
@pytest.mark.parametrize("front, modules", [("flat", True), ("composable", False)])
def test_input_shard_and_update_are_named(rank, world_size, front, modules):
    model = made(front)
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model, modules=modules):
        x = torch.ones(4, WIDTH)
        x[2, rank] = NAN if rank == CULPRIT else 0.0
        model(x).sum().backward()
    assert place(caught.value) == (CULPRIT, "input", "", "") and not caught.value.first.made
    assert caught.value.first.index == (2, CULPRIT) and "It came in" in str(caught.value)

    def spoil_shard(model: nn.Module) -> None:
        last = [param for param in inner(inner(model).blocks[1]).parameters() if param.numel()][-1]
        getattr(last, "_local_tensor", last).detach().view(-1)[-1] = NAN

    error = error_of(made(front), spoil_shard, modules=modules)
    assert place(error) == (CULPRIT, "parameter", "blocks.1", "blocks.1.down") and error.first.made
    assert [other.made for other in error.also] == [False]  # the gather brought it

    model = made(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf if rank == CULPRIT else 0.01)
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model, modules=modules):
        step(model, optimizer)
    assert caught.value.first.rank == CULPRIT and caught.value.first.phase == "update"
    assert "Made by SGD" in str(caught.value)


@ranks(2)
def test_the_own_code_of_a_module_and_a_loss_are_told_apart(rank, world_size):
    class Dividing(Net):
        def forward(self, x):
            x = self.blocks[0](self.stem(x))
            return self.head(self.blocks[1](x / self.divisor))

    torch.manual_seed(0)
    net = Dividing()
    net.divisor = 1.0
    model = shard("orig", net, ModuleWrapPolicy({Block}))
    for modules in (True, False):
        with pytest.raises(NonFiniteError) as caught, find_nonfinite(model, modules=modules):
            net.divisor = 0.0 if rank == CULPRIT else 1.0
            model(torch.ones(4, WIDTH)).sum().backward()
        assert caught.value.first.made and caught.value.first.phase == "input"
        assert "Made in the forward of (root), outside of the" in str(caught.value)
        net.divisor = 1.0
        with pytest.raises(NonFiniteError) as caught, find_nonfinite(model, modules=modules):
            (model(torch.ones(4, WIDTH)) * (NAN if rank == CULPRIT else 1.0)).sum().backward()
        assert place(caught.value) == (CULPRIT, "gradient of output", "", "head" if modules else "")
        assert not caught.value.first.made and "It came in from the loss" in str(caught.value)


SLOW = pytest.mark.slow
CLEAN: dict[str, dict[str, Any]] = {
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "checkpointed": {"net": CheckpointedNet},
    "reentrant": {"net": ReentrantNet},
}


@ranks(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[SLOW] * (case != "checkpointed")) for case in CLEAN]
)
def test_clean_steps_raise_nothing_and_spoilt_ones_do(rank, world_size, case):
    model = made("orig", **CLEAN[case])
    error = error_of(model, partial(spoil_output, NAN))
    assert place(error) == (CULPRIT, "output", "blocks.1", "blocks.1.between")
    error = error_of(model, spoil_gradient)
    assert error.first.rank == CULPRIT and error.first.unit == "blocks.1"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for modules in (True, False):
        with find_nonfinite(model, modules=modules):
            for _ in range(3):
                with no_sync(model):
                    model(torch.ones(4, WIDTH)).sum().backward()
                step(model, optimizer)
                with torch.no_grad():
                    model(torch.ones(4, WIDTH))


@ranks(2)
@pytest.mark.parametrize("front", ["composable", "whole"])
def test_all_ranks_raise_whatever_each_of_them_runs(rank, world_size, front):
    whole: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    model = made(front) if front == "composable" else made("flat", **whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(4, WIDTH)
    for program in apart.programs_for(model):
        with find_nonfinite(model):
            program(model, optimizer, lambda model: model(x).square().mean())
    error = error_of(model, partial(spoil_output, NAN))
    assert place(error) == (CULPRIT, "output", "blocks.1", "blocks.1.between")


@ranks(2)
@each_front
def test_parameters_of_tensor_parallelism_are_looked_at_in_inference_mode(rank, world_size, front):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    model = shard(front, model, device_mesh=mesh["shard"])
    with find_nonfinite(model), torch.inference_mode():
        model(torch.ones(2, 4))
    with pytest.raises(NonFiniteError), find_nonfinite(model), torch.inference_mode():
        model(torch.full((2, 4), NAN))


@ranks(2)
def test_a_reproducible_model_raises_too(rank, world_size):
    model = made("composable")
    steps = reproducible(model, micro_batches=2)
    with pytest.raises(NonFiniteError) as caught, find_nonfinite(model):
        for _ in steps.micro_batches(0):
            if rank == CULPRIT:
                spoil_output(NAN, model)
            model(torch.ones(4, WIDTH)).square().mean().backward()
    assert place(caught.value) == (CULPRIT, "output", "blocks.1", "blocks.1.between")


@SLOW
@ranks(4)
def test_all_ranks_of_a_hybrid_mesh_raise(rank, world_size):
    model = made("composable", **chosen("composable", "HYBRID_SHARD", world_size))
    error = error_of(model, partial(spoil_output, NAN))
    assert place(error) == (CULPRIT, "output", "blocks.1", "blocks.1.between")


@ranks(2)
def test_an_error_of_the_program_tells_what_was_found_before(rank, world_size):
    model = made()
    with pytest.raises(KeyError) as caught, find_nonfinite(model):
        if rank == CULPRIT:
            spoil_output(NAN, model)
        model(torch.ones(4, WIDTH))
        raise KeyError("mine")
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (rank == CULPRIT)
    assert all("blocks.1.between" in note for note in notes)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_results_that_stay_on_the_device_are_read_once():
    looks = Looks(3, deferred=True)
    looks.restart(7)
    for step, value in enumerate((1.0, INF, NAN)):
        values = torch.full((2, 3), 0.5)
        values[1, 1] = value
        spot = Spot("output", f"blocks.{step}", f"blocks.{step}")
        looks.look(Origin(spot, True, "Made here"), "output", activations([torch.ones(2), values]))
        assert looks.finding is None
    finding = looks.take()
    assert finding is not None and looks.take() is None
    assert (finding.rank, finding.iteration, finding.look, finding.unit) == (3, 7, 2, "blocks.1")
    assert (finding.tensor, finding.shape, finding.index, finding.nan) == ("output 1", (2, 3), None, -1)
    assert finding.before == (("output of 'blocks.0'", 1.0),)
    assert "output 1 of shape (2, 3) is not finite. Made here." in finding.describe()


def test_tensor_subclasses_are_looked_at_beside_plain_tensors():
    looks, spot = Looks(0, deferred=False), Spot("parameter", "", "")
    for value in (1.0, NAN):
        values = torch.tensor([0.5, value])
        pieces = activations([torch.ones(2), TwoTensor(values, values.clone())])
        looks.look(Origin(spot, True, "Made here"), "parameter", pieces)
        assert (looks.finding is None) is (value == 1.0)
    assert looks.finding is not None and looks.finding.tensor == "parameter 1"


def test_nothing_sharded_is_refused():
    with pytest.raises(ValueError, match="no wrapped or sharded module"), find_nonfinite(nn.Linear(1, 1)):
        pass
