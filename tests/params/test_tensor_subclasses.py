"""Parameters of tensor subclasses that say, by `fsdp_pre_all_gather`, what is gathered of them."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fronts
import nets
from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from bed.sampling import few_fast
from fronts import each_form
from fsdp_wrap import (
    CPUOffload,
    IntervalTensor,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    iter_full_params,
    record_events,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from params.subclasses import Mute, Packed, Rounded, quantised, restored
from scenario import name_of, pairwise

WIDTH, HIDDEN = 6, 8


class Old(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        return quantised(self.values_), "told"


class Rounding(nn.Linear):
    rounds = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, values = self.weight, self.weight.detach()
        if self.rounds:  # and hands gradients on
            weight = weight + (restored(*quantised(values), values.dtype) - values)
        return F.linear(x, weight, self.bias)


class Block(nn.Module):
    def __init__(self, hidden: int, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down = Rounding(WIDTH, hidden), Rounding(hidden, WIDTH)
        self.checkpointed, self.skips = checkpointed, False

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.skips:
            return x
        return checkpoint(self._compute, x, use_reentrant=False) if self.checkpointed else self._compute(x)


def plain_net(hidden: int = HIDDEN, checkpointed: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(hidden, checkpointed) for _ in range(3)), nn.Linear(WIDTH, 3)).double()


def converted(net: nn.Sequential, kind: Any = Rounded, frozen: bool = False) -> nn.Sequential:
    net = copy.deepcopy(net)
    for layer in (module for module in net.modules() if isinstance(module, Rounding)):
        layer.rounds = False
        make = Packed.of if kind is Packed else kind
        layer.weight = nn.Parameter(make(layer.weight.detach()), requires_grad=not frozen)
    return net


def sharded(net: nn.Sequential, **options: Any) -> Any:
    return fronts.shard("composable", net, ModuleWrapPolicy({Block, nets.Block}), **options)


def values_of(param: torch.Tensor) -> torch.Tensor:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.values_ if isinstance(local, Rounded) else local.detach()


def assert_same(model: nn.Module, reference: nn.Module, atol: float = 1e-12) -> None:
    """Parameters and gradients are this rank's rows of a plain model's."""
    for (name, param), wanted in zip(model.named_parameters(), reference.parameters()):
        assert isinstance(param, DTensor)
        rows = slice(*_rows(param))
        torch.testing.assert_close(
            values_of(param.detach()), wanted.detach()[rows], rtol=0, atol=atol, msg=name
        )
        assert (param.grad is None) == (wanted.grad is None), name
        if param.grad is not None:
            assert type(param.grad.to_local()) is torch.Tensor, name
            torch.testing.assert_close(param.grad.to_local(), wanted.grad[rows], rtol=0, atol=atol, msg=name)


def _rows(param: DTensor) -> tuple[int, int]:
    mesh = param.device_mesh
    chunk = -(-param.shape[0] // mesh.size(mesh.ndim - 1))
    first = min(mesh.get_local_rank(mesh.ndim - 1) * chunk, param.shape[0])
    return first, min(first + chunk, param.shape[0])


SPACE: dict[str, Sequence[Any]] = {
    "kind": [Rounded, Old],
    "hidden": [8, 7, 3],  # what four ranks divide, what they do not, and fewer rows than ranks
    "mesh": ["flat", "hybrid"],
    "reshard": [None, True, False, 2],
    "checkpointed": [False, True],
    "accumulation": ["T", "FT", "TT"],
    "precision": ["none", "float32"],
    "shared_memory": [True, False],
    "together": [0, None],
    "unused": [False, True],
}


@pytest.mark.parametrize("scenario", few_fast(pairwise(SPACE, seed=22), step=9), ids=name_of)
@ranks(4)
def test_training_is_that_of_a_plain_model_that_rounds(rank, world_size, scenario):
    hybrid, low = scenario["mesh"] == "hybrid", scenario["precision"] == "float32"
    shape, names = ((2, world_size // 2), ("replicate", "shard")) if hybrid else ((world_size,), ("shard",))
    reference = plain_net(scenario["hidden"])
    model = sharded(
        converted(plain_net(scenario["hidden"], scenario["checkpointed"]), scenario["kind"]),
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
        reshard_after_forward=True if scenario["reshard"] == 2 and hybrid else scenario["reshard"],
        mp_policy=MixedPrecisionPolicy(torch.float32 if low else None, cast_forward_inputs=True),
        shared_memory=scenario["shared_memory"],
        travel_together_bytes=scenario["together"],
    )
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (reference, model)]
    batches = torch.Generator().manual_seed(1)
    for step in range(3):
        for syncs in scenario["accumulation"]:
            x = torch.randn(world_size, 2, WIDTH, dtype=torch.float64, generator=batches)
            reference[2].skips = model[2].skips = scenario["unused"] and step == 1
            model.set_requires_gradient_sync(syncs == "T")
            for part in x:
                (reference(part).square().mean() / world_size).backward()
            model(x[rank]).square().mean().backward()
        assert_same(model, reference, 1e-5 if low else 1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def steps(model: Any, number: int = 2, world_size: int = 1, part: int | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    batches, outputs = torch.Generator().manual_seed(3), []
    for _ in range(number):
        x = torch.randn(world_size, 2, WIDTH, dtype=torch.float64, generator=batches)
        outputs.append(model(x if part is None else x[part]))
        outputs[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


@ranks(4)
def test_a_subclass_is_told_of_the_whole(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float64)
    model = sharded(converted(plain_net(7)), mesh=mesh, mp_policy=policy)
    Rounded.asked.clear()
    with torch.no_grad():
        model(torch.randn(2, WIDTH, dtype=torch.float64))
    assert len(Rounded.asked) == 6
    for asked, layer in zip(Rounded.asked, [part for block in model[:3] for part in (block.up, block.down)]):
        assert asked == (mesh["shard"], layer.weight.shape, (layer.weight.shape[1], 1), layer, policy)
        assert layer.weight.dtype == torch.float64
    model[0].unshard()
    assert type(model[0].up.weight) is nn.Parameter and model[0].up.weight.dtype == torch.float32


@ranks(2)
def test_frozen_ones_are_gathered_as_they_are_stored(rank, world_size):
    reference, model = plain_net(), sharded(converted(plain_net(), Packed, frozen=True), shared_memory=False)
    for layer in (module for module in reference.modules() if isinstance(module, Rounding)):
        layer.rounds = False
        layer.weight = nn.Parameter(Packed.of(layer.weight.detach()).values(), False)
    wanted = steps(reference, world_size=world_size)
    with record_events() as events, count_collectives(objects=False) as counted:
        results = steps(model, world_size=world_size, part=rank)
    for one, other in zip(results, wanted):
        torch.testing.assert_close(one, other[rank], rtol=0, atol=1e-12)
    unit = model[0]
    assert {type(part.weight.to_local()) for part in (unit.up, unit.down)} == {Packed}
    assert unit.up.weight.grad is None
    packed = HIDDEN * WIDTH + 4 * HIDDEN, WIDTH * HIDDEN + 4 * WIDTH
    assert 3 * 4 * sum(packed) <= counted["all_gather_into_tensor"].bytes
    assert counted["all_gather_into_tensor"].bytes < 3 * 4 * (sum(packed) + 3 * 16 * world_size + 400)
    biases = 8 * (HIDDEN + WIDTH) * 3 + 8 * (WIDTH * 3 + 3)
    assert counted["reduce_scatter_tensor"].bytes < 2 * (biases + 4 * 8 * 16), (
        "no matrix is among what is summed"
    )
    assert {event.unit for event in events if event.kind.value == "unshard"} == {"", "0", "1", "2"}


@ranks(2)
def test_what_a_subclass_computes_with_is_freed_unless_somebody_keeps_it(rank, world_size):
    model = sharded(converted(plain_net(512)), reshard_after_forward=False)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        for unit in (model, *model[:3]):
            unit.reshard()
        before = live_bytes()
        model[0].unshard()
        full = 512 * WIDTH * 2
        assert live_bytes() - before >= full * (8 + 1), "values to compute with, and what they were made of"
        model[0].reshard()
        assert live_bytes() == before
    output = model(x)
    held = model[0].up.weight
    values = held.detach().clone()
    model.reshard()
    model[0].reshard()
    assert model[0].up.weight is not held and torch.equal(held.detach(), values)
    del held, output
    steps(model)


@ranks(2)
def test_states_checkpoints_and_copies_have_tensors_of_the_subclass(rank, world_size, tmp_path):
    torch.serialization.add_safe_globals([Rounded, Packed])
    for kind in (Rounded, Packed):
        model = sharded(converted(plain_net(), kind, frozen=kind is Packed))
        steps(model)
        state = model.state_dict()
        entry = state["1.up.weight"]
        assert isinstance(entry, DTensor) and entry.placements == (Shard(0),)
        assert type(entry.to_local()) is kind
        dcp.save(state, checkpoint_id=tmp_path / kind.__name__)
        loaded = sharded(converted(plain_net(seed=7), kind, frozen=kind is Packed))
        steps(loaded, 1)
        target = loaded.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / kind.__name__)
        loaded.load_state_dict(target)
        x = torch.randn(2, WIDTH, dtype=torch.float64)
        before = model(x)
        assert torch.equal(loaded(x), before), kind
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), before) and type(twin[0].up.weight.to_local()) is kind
        steps(twin, 1)
        assert torch.equal(model(x), before) and not torch.equal(twin(x), before)


class Moody(Rounded):
    times = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        type(self).times += 1
        return (self.values_.to(torch.float32 if self.times <= 6 else torch.float16),), "told"

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0].to(param_dtype), ()


NOTHING = property()  # as good as no method


def wrong(before: Any = NOTHING, after: Any = NOTHING) -> Any:
    return type("Wrong", (Rounded,), {"fsdp_pre_all_gather": before, "fsdp_post_all_gather": after})


@ranks(2)
def test_what_cannot_be_sharded_is_refused_before_anything_changes(rank, world_size):
    half = wrong(before=Rounded.fsdp_pre_all_gather)
    odd = wrong(lambda self, mesh, size: None, Rounded.fsdp_post_all_gather)
    columns = partial(fully_shard, shard_placement_fn=lambda param: Shard(1))
    for kind, shard, error, said in (
        (half, fully_shard, TypeError, "fsdp_post_all_gather.*'up.weight'|'up.weight'.*fsdp_post_all_gather"),
        (odd, fully_shard, TypeError, "mesh, size.*'up.weight'|'up.weight'.*mesh, size"),
        (Rounded, FSDP, TypeError, "'up.weight' is a Rounded"),
        (Rounded, columns, ValueError, "'up.weight' is a Rounded.*dimension 0"),
    ):
        block: Any = converted(plain_net(), kind)[1]
        with pytest.raises(error, match=said):
            shard(block)
        assert type(block) is Block and type(block.up.weight) is kind


@ranks(2)
def test_what_a_subclass_does_wrong_is_named_in_the_forward(rank, world_size):
    x, after = torch.randn(2, WIDTH, dtype=torch.float64), Rounded.fsdp_post_all_gather
    for kind, error, said in (
        (wrong(), TypeError, "without fsdp_pre_all_gather and fsdp_post_all_gather"),
        (wrong(lambda self, mesh: (self.values_, None), after), TypeError, "must return a tuple"),
        (wrong(lambda self, mesh: ((torch.zeros(5),), None), after), ValueError, "not divided evenly"),
        (Moody, RuntimeError, "must stay the same"),
    ):
        model = sharded(converted(plain_net(7), kind))
        with pytest.raises(error, match="'up.weight'") as caught:
            for _ in range(2):
                model(x)
        assert said in str(caught.value)


# frozen ones that only tell of which tensors they are made, below both front-ends

ROWS, BLOCKS = 5, 3


def net(seed: int = 0, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nets.Block().double() for _ in range(BLOCKS)]
    for block in blocks:
        block.up.weight = nn.Parameter(Mute.of(block.up.weight.detach()), requires_grad=False)
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return nn.Sequential(*blocks)


def wrapped(model: nn.Module, **options: Any) -> Any:
    options = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({nets.Block}), **options}
    return FSDP(model, shared_memory=False, **options)


def inputs(world_size: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world_size, 4, WIDTH, dtype=torch.float64, generator=generator)


def train(model: Any, reference: nn.Module, rank: int, world_size: int) -> None:
    trained = [[param for param in which.parameters() if param.requires_grad] for which in (model, reference)]
    for step in range(3):
        x = inputs(world_size, step)
        wanted = [reference(part).square().mean() for part in x]
        (sum(wanted) / world_size).backward()
        loss = model(x[rank]).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, wanted[rank], rtol=0, atol=1e-12)
        for params in trained:
            optimizer = torch.optim.SGD(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()


def assert_same_state(actual: Any, wanted: Any) -> None:
    assert list(actual) == list(wanted)
    for name, value in wanted.items():
        assert type(actual[name]) is type(value), name
        if type(value) is Mute:
            for inner in ("rows", "scales", "added"):
                assert torch.equal(getattr(actual[name], inner), getattr(value, inner)), (name, inner)
        else:
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12)


FAST = ("full", "hybrid", "checkpointed")
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": False},
    "offload": {"cpu_offload": CPUOffload(True)},
    "checkpointed": {},
    "root_alone": {"auto_wrap_policy": None},
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in FAST else pytest.mark.slow) for how in HOW]
)
@ranks(4)
def test_the_wrapper_computes_as_a_plain_model(rank, world_size, how):
    options = dict(HOW[how])
    if how == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    reference, model = net(), wrapped(net(checkpointed=how == "checkpointed"), **options)
    train(model, reference, rank, world_size)
    assert_same_state(model.state_dict(), reference.state_dict())
    shown = {name: param for name, param in model.named_parameters() if param.dtype == torch.uint8}
    assert len(shown) == BLOCKS and not any(param.requires_grad for param in shown.values())
    if how in ("full", "offload"):
        bytes_of_one = sum(-(-nbytes // 16) * 16 for nbytes in (ROWS * WIDTH, ROWS * 4, 8))
        held = torch.tensor([param.numel() for param in shown.values()])
        dist.all_reduce(held)
        assert held.tolist() == [bytes_of_one] * BLOCKS


@ranks(4)
def test_fully_shard_computes_as_a_plain_model(rank, world_size):
    for options in ({}, {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))}):
        reference, model = net(), sharded(net(), shared_memory=False, **options)
        train(model, reference, rank, world_size)
        local, whole = model[1].up.weight.to_local(), reference[1].up.weight
        parts, at = (4, rank) if not options else (2, rank % 2)
        chunk = -(-ROWS // parts)
        assert type(local) is Mute and torch.equal(local.rows, whole.rows[at * chunk : (at + 1) * chunk])
        assert torch.equal(local.added, whole.added)
        twin, x = copy.deepcopy(model), inputs(1)[0]
        assert torch.equal(twin(x), model(x)) and type(twin[0].up.weight.to_local()) is Mute


@ranks(2)
def test_they_travel_as_they_are_stored_and_are_freed(rank, world_size):
    before = live_bytes()
    wide = nn.Linear(512, 512, dtype=torch.float64, bias=False)
    wide.weight = nn.Parameter(Mute.of(wide.weight.detach()), requires_grad=False)
    model = FSDP(wide, shared_memory=False)
    del wide
    with torch.no_grad(), count_collectives(objects=False) as counted:
        model(torch.randn(1, 512, dtype=torch.float64))
    stored = 512 * 512 + 512 * 4 + 16
    assert stored <= counted["all_gather_into_tensor"].bytes <= stored + 256
    assert live_bytes() - before < 0.6 * stored, "half of the bytes, and none of what was gathered"


@ranks(2)
def test_full_parameters_are_of_the_subclass_and_may_be_edited(rank, world_size):
    reference, model = net(), wrapped(net())
    x = inputs(1)[0]
    model(x)
    for offload in (False, True):
        with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=offload):
            assert_same_state(model.state_dict(), reference.state_dict())
            model[0].up.weight.rows.zero_()
        assert torch.equal(model(x), reference(x))
    other = net(1)
    with FSDP.summon_full_params(model), torch.no_grad():
        for block, plain in zip(model.module, reference):
            block.up.weight.scales.mul_(2)
            plain.up.weight.scales.mul_(2)
        model[1].up.weight = copy.deepcopy(other[1].up.weight)
    reference[1].up.weight = other[1].up.weight
    assert torch.equal(model(x), reference(x))
    with FSDP.summon_full_params(model, rank0_only=True), torch.no_grad():
        if rank == 0:
            model[2].up.weight.added.fill_(0.25)
    with torch.no_grad():
        reference[2].up.weight.added.fill_(0.25)
    assert torch.equal(model(x), reference(x))
    with pytest.raises(ValueError, match="up.weight' was replaced inside summon_full_params"):
        with FSDP.summon_full_params(model):
            model[0].up.weight = nn.Parameter(torch.zeros(ROWS, WIDTH), requires_grad=False)
    streamed, wanted = iter_full_params(model), reference.named_parameters()
    assert_same_state(*({name: value.detach() for name, value in params} for params in (streamed, wanted)))
    twin = copy.deepcopy(model)
    with FSDP.summon_full_params(twin), torch.no_grad():
        twin[0].up.weight.added.fill_(1.0)
    assert torch.equal(model(x), reference(x)) and not torch.equal(twin(x), model(x))


class Listens(nets.Block):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@each_form
@ranks(2)
def test_state_dicts(rank, world_size, use_orig_params, tmp_path):
    reference, x, form = net(), inputs(1)[0], {"use_orig_params": use_orig_params}
    model = wrapped(net(), **form)
    full = model.state_dict()
    assert_same_state(full, reference.state_dict())
    plain = net(1)
    plain.load_state_dict(full)
    assert torch.equal(plain(x), reference(x))
    for how in (nets.Block, Listens):
        fresh: Any = net(1)
        for block in fresh:
            block.__class__ = how
        other = wrapped(fresh, auto_wrap_policy=ModuleWrapPolicy({how}), **form)
        other(x)
        other.load_state_dict(reference.state_dict())
        assert torch.equal(other(x), reference(x)), how

    def load(other: Any, kind: StateDictType, group: Any = None) -> None:
        with FSDP.state_dict_type(other, kind):
            target = other.state_dict()
            dcp.load(target, checkpoint_id=tmp_path / kind.name, process_group=group)
            other.load_state_dict(target)
        assert torch.equal(other(x), reference(x)), kind

    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        assert "LOCAL" in kind.name or isinstance(state["0.up.weight"], IntervalTensor)
        dcp.save(state, checkpoint_id=tmp_path / kind.name)
        load(wrapped(net(1), **form), kind)
    alone = dist.new_group([rank], use_local_synchronization=True)  # saved by two ranks, loaded by one
    other = wrapped(net(1), device_mesh=DeviceMesh.from_group(alone, "cpu"), **form)
    load(other, StateDictType.SHARDED_STATE_DICT, alone)


@ranks(2)
def test_other_values_are_refused_by_name_and_those_of_the_first_rank_sent(rank, world_size):
    model, reference, x = wrapped(net(rank), sync_module_states=True), net(), inputs(1)[0]
    assert_same_state(model.state_dict(), reference.state_dict())
    state, wider = model.state_dict(), nn.Linear(WIDTH + 1, ROWS, dtype=torch.float64).weight.detach()
    for value, said in (
        (state["1.up.weight"].values(), "Tensor of shape.*the model a Mute of shape"),
        (Mute.of(wider), "a Mute of shape .5, 7.*the model a Mute of shape .5, 6"),
    ):
        state["1.up.weight"] = value
        with pytest.raises(RuntimeError, match=f"1.up.weight.*{said}"):
            model.load_state_dict(state)
    assert torch.equal(model(x), reference(x))


@ranks(2)
def test_what_cannot_be_kept_is_refused_by_name(rank, world_size):
    trains, nested = net(), net()
    trains[1].up.weight = nn.Parameter(trains[1].up.weight.detach(), requires_grad=True)
    inner = nested[1].up.weight.detach()
    nested[1].up.weight = nn.Parameter(Mute(inner, inner.scales, inner.added), requires_grad=False)
    for model, said in (
        (trains, "'1.up.weight' is a Mute that trains.*freeze.*fully_shard"),
        (nested, "'1.up.weight' is a Mute that is made of subclasses itself"),
    ):
        with pytest.raises(TypeError, match=said):
            FSDP(model)
        assert type(model) is nn.Sequential and type(model[1].up.weight) is Mute
        FSDP(model, ignored_states=[model[1].up.weight])  # type: ignore[arg-type]
