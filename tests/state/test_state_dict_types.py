"""Full state dicts for one rank or for the host, sharded and local ones."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from fronts import each_form
from fsdp_wrap import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    IntervalTensor,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._params.interval_tensor import boxes_of
from state_nets import (
    FULL,
    LOCAL,
    MODELS,
    SHARDED,
    WIDTH,
    Block,
    Buffered,
    Failing,
    Net,
    WithFailing,
    adamw,
    assert_close,
    assert_equal,
    below_plain,
    by_hand,
    changed,
    load,
    new_batches,
    per_block,
    take,
    train_side_by_side,
    whole,
    wrapped_and_plain,
)

WAYS = [(whole, True), (per_block, False), (by_hand, True), (below_plain, False)]
"""Of wrapping, with a form of the wrapper."""
each_of_four = pytest.mark.parametrize(("wrap", "use_orig_params"), WAYS)


def full(state: dict[str, Any]) -> dict[str, Any]:
    """The full tensors of a sharded state dict."""
    return {
        name: value.full_tensor() if isinstance(value, IntervalTensor) else value
        for name, value in state.items()
    }


# Settings.


@ranks(1)
def test_the_kind_is_chosen_for_all_instances_below_and_restored(rank, world_size):
    model = per_block(Net())
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert FSDP.get_state_dict_type(model) == default
    config = ShardedStateDictConfig(offload_to_cpu=True)
    sharded = StateDictSettings(SHARDED, config, ShardedOptimStateDictConfig())
    with FSDP.state_dict_type(model, SHARDED, config):
        assert FSDP.get_state_dict_type(model) == sharded
        assert FSDP.get_state_dict_type(model.module.blocks[1]) == sharded
        with pytest.raises(ArithmeticError), FSDP.state_dict_type(model, LOCAL):
            assert FSDP.get_state_dict_type(model).state_dict_config == LocalStateDictConfig()
            raise ArithmeticError
        assert FSDP.get_state_dict_type(model) == sharded
    assert FSDP.get_state_dict_type(model) == default
    assert FSDP.set_state_dict_type(model, SHARDED, config) == default
    assert FSDP.set_state_dict_type(model.module.blocks[0], LOCAL) == sharded
    with pytest.raises(ValueError, match=r"blocks\.0.*choose one kind"):
        FSDP.get_state_dict_type(model)
    plain = nn.Linear(1, 1)
    with FSDP.state_dict_type(plain, SHARDED):
        assert FSDP.get_state_dict_type(plain) == default


@ranks(1)
def test_configurations_that_do_not_belong_together(rank, world_size):
    model = whole(Net())
    before = FSDP.get_state_dict_type(model)
    for error, arguments, message in (
        (TypeError, (SHARDED, FullStateDictConfig()), "takes a ShardedStateDictConfig as state_dict_config"),
        (RuntimeError, (FULL, LocalStateDictConfig()), "takes a FullStateDictConfig"),  # as torch has it
        (TypeError, (FULL, None, ShardedOptimStateDictConfig()), "takes a FullOptimStateDictConfig"),
        (TypeError, (1,), "must be a StateDictType, not 1"),
    ):
        with pytest.raises(error, match=message):
            FSDP.set_state_dict_type(model, *arguments)
        with pytest.raises(error, match=message), FSDP.state_dict_type(model, *arguments):
            pass
        assert FSDP.get_state_dict_type(model) == before


# Full, for the first rank and for the host.


@pytest.mark.parametrize("name", ["Tied", "Buffered", "Hooked"])
@ranks(3)
def test_the_first_rank_alone_gets_a_full_state_dict(rank, world_size, name):
    # A tie between a wrapped module and a plain one above cannot last.
    for wrap, use_orig_params in WAYS[:3] if name == "Tied" else WAYS:
        model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        state, expected = take(model, FULL, FullStateDictConfig(True, rank0_only=True)), plain.state_dict()
        if rank == 0:
            assert_equal(state, expected)
        else:  # what no instance wraps is on every rank
            assert_equal(state, {name: expected[name] for name in state} if wrap is below_plain else {})
            assert not any(name.startswith(("stem", "blocks.1")) for name in state)
        assert_equal(model.state_dict(), expected)


@ranks(4)
def test_the_first_rank_of_a_hybrid_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    model = per_block(Net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    state = take(model, FULL, FullStateDictConfig(rank0_only=True))
    assert bool(state) == (rank == 0)


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@ranks(2)
def test_offloaded_values_are_copies(rank, world_size, kind):
    config = {FULL: FullStateDictConfig, SHARDED: ShardedStateDictConfig, LOCAL: LocalStateDictConfig}[kind]
    for wrap, use_orig_params in WAYS:
        net = Buffered().double()
        model = wrap(net, use_orig_params=use_orig_params, ignored_modules=[net.head])
        state = take(model, kind, config(offload_to_cpu=True))
        before = copy.deepcopy(state)
        with torch.no_grad():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.add_(1)
        for name, value in before.items():
            if wrap is not below_plain or name.startswith(("stem", "blocks.1")):
                found, expected = (getattr(each, "piece", each) for each in (state[name], value))
                assert torch.equal(found, expected), name


class Chain(nn.Module):
    """Units nested in each other, of one size each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(40_000))
        self.inner = Chain(depth - 1) if depth > 1 else None


@each_form
@ranks(2)
def test_memory_of_a_full_state_dict_is_the_result_and_one_unit(rank, world_size, use_orig_params):
    depth, unit = 5, 40_000 * 4
    for rank0_only in (False, True):
        model = per_chain(Chain(depth), use_orig_params)
        peaks: list[int] = []
        for module in model.modules():
            module.register_state_dict_pre_hook(lambda *_, peaks=peaks: peaks.append(live_bytes()))
        before = live_bytes()
        state = take(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only))
        result = 0 if rank0_only and rank else depth * unit
        assert sum(value.nbytes for value in state.values()) == result
        assert max(peaks) - before <= result + 1.05 * unit
        del state


def per_chain(chain: Any, use_orig_params: bool) -> FSDP:
    if chain.inner is not None:
        chain.inner = per_chain(chain.inner, use_orig_params)
    return FSDP(chain, use_orig_params=use_orig_params)


# Sharded.


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (2, 3, 2, 3), (0, 3), (5, 1, 2)])
def test_boxes_cover_every_interval_once(shape):
    numel = torch.Size(shape).numel()
    values = torch.arange(numel)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = torch.full(shape, -1)
        boxes = list(boxes_of(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box in boxes:
            part = found[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes))]
            assert box.numel > 0 or numel == 0
            assert (part == -1).all(), "twice"
            part.copy_(values[box.first : box.first + box.numel].view(box.sizes))
        expected = torch.full((numel,), -1)
        expected[start:stop] = values[start:stop]
        assert torch.equal(found.flatten(), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("Tied", "Shared")])
@ranks(3)
def test_sharded_values_stand_for_those_of_the_plain_module(rank, world_size, name):
    for wrap, use_orig_params in [*WAYS, (whole, False)]:
        model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        with count_collectives() as counts:
            state = take(model, SHARDED)
        assert counts == {}
        assert_equal(full(state), plain.state_dict())
        params = dict(plain.named_parameters())
        for key, value in state.items():
            owned = wrap is not below_plain or key.startswith(("stem", "blocks.1"))
            expected = key.removesuffix("_doubled") in params and owned
            assert isinstance(value, IntervalTensor) == expected, key
        assert_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["Tied", "Shared"])
@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
@ranks(2)
def test_tied_parameters_travel_by_pieces(rank, world_size, kind, name):
    for wrap, use_orig_params in WAYS[:3]:
        model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        state = copy.deepcopy(take(model, kind))
        if kind is SHARDED:
            assert_equal(full(state), plain.state_dict())
        else:
            assert all(name.endswith("_flat_param") for name in state)
        model.load_state_dict(changed(plain.state_dict()))
        assert str(load(model, kind, state)) == "<All keys matched successfully>"
        assert_equal(model.state_dict(), plain.state_dict())
        train_side_by_side(2, model, adamw(model), plain, adamw(plain))
        assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["Buffered", "Mixed"])
@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
@ranks(2)
def test_pieces_are_loaded_without_communication(rank, world_size, kind, name):
    """From a file, into the other form of the wrapper."""
    for wrap, use_orig_params in WAYS:
        source, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        model, _ = wrapped_and_plain(MODELS[name], wrap, not use_orig_params)
        model.load_state_dict(changed(plain.state_dict()))
        stored = io.BytesIO()
        torch.save(take(source, kind), stored)
        stored.seek(0)
        state = torch.load(stored, weights_only=True)
        for fqn, value in take(source, kind).items():
            assert bool((state[fqn] == value).all()) and torch.equal(state[fqn], value)
        with count_collectives() as counts:
            assert str(load(model, kind, state)) == "<All keys matched successfully>"
        assert counts == {}
        assert_equal(model.state_dict(), plain.state_dict())


@each_form
@ranks(2)
def test_pieces_are_the_models_memory_and_copied_straight_into_it(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    kept = take(model, SHARDED)
    before = live_bytes()
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict(keep_vars=True)
    assert live_bytes() - before < 1000
    for value in state.values():
        value.detach().zero_()
    assert all(not value.any() for value in model.state_dict().values())
    with mock.patch.object(FSDP, "_load_from_state_dict") as walked:
        load(model, SHARDED, kept)
    assert not walked.called
    assert_equal(model.state_dict(), plain.state_dict())


@ranks(3)
def test_full_tensors_are_loaded_without_communication(rank, world_size):
    for wrap, use_orig_params in WAYS:
        model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
        state = changed(plain.state_dict())
        with count_collectives() as counts:
            load(model, SHARDED, state)
        assert counts == {}
        assert_equal(model.state_dict(), state)


@each_form
@ranks(2)
def test_loading_pieces_in_the_middle_of_training(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    state, expected = copy.deepcopy(take(model, SHARDED)), copy.deepcopy(plain.state_dict())
    ours, theirs = adamw(model), adamw(plain)
    train_side_by_side(2, model, ours, plain, theirs)
    model(new_batches()[rank])  # the root keeps its parameters for a backward that never comes
    load(model, SHARDED, state)
    plain.load_state_dict(expected)
    train_side_by_side(2, model, ours, plain, theirs)
    assert_close(model.state_dict(), plain.state_dict())


@ranks(2)
def test_torchs_own_sharded_tensors_are_loaded(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    expected = changed(plain.state_dict())
    other = copy.deepcopy(plain)
    other.load_state_dict(expected)
    fully_shard(other.head, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(other.blocks[1].up, mesh=init_device_mesh("cpu", (2,)))
    state: dict[str, Any] = other.state_dict()
    assert isinstance(state["blocks.1.up.weight"], DTensor)
    state["stem.weight"] = sharded_tensor(expected["stem.weight"], rank)
    for kind in (SHARDED, FULL):
        model.load_state_dict(plain.state_dict())
        load(model, kind, state)
        assert_equal(model.state_dict(), expected)


def sharded_tensor(value: torch.Tensor, rank: int) -> Any:
    """Torch's kind: two rows on the first rank, the rest on the second."""
    rows = [(0, 2), (2, len(value))][rank]
    part = value[rows[0] : rows[1]].clone()
    shard = Shard.from_tensor_and_offsets(part, [rows[0], 0], rank)
    return init_from_local_shards([shard], *value.shape)


@ranks(4)
def test_pieces_convert_to_dtensors(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, False)
    expected = plain.state_dict()
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        for name, value in take(model, SHARDED).items():
            converted = value.to_dtensor(mesh)
            assert isinstance(converted, DTensor) and converted.device_mesh == mesh
            assert torch.equal(converted.full_tensor(), expected[name]), name


@ranks(1)
def test_operations_on_pieces(rank, world_size):
    value = IntervalTensor(torch.Size((3, 4)), 2, torch.arange(5.0))
    assert torch.equal((value * 2 + value).piece, 3 * value.piece)
    assert value.to(torch.bfloat16).piece.dtype == torch.bfloat16
    assert (value.clone().start, value.clone().shape) == (2, (3, 4))
    assert copy.deepcopy(value).mul_(2).piece.sum() == 20 and value.piece.sum() == 10
    for action in (value.sum, lambda: torch.ones(3, 4).copy_(value), lambda: value.add_(torch.ones(3, 4))):
        with pytest.raises(TypeError, match="full_tensor|cannot combine"):
            action()
    with pytest.raises(ValueError, match="elements 3 to 8 do not match elements 2 to 7"):
        value.add_(IntervalTensor(torch.Size((3, 4)), 3, torch.arange(5.0)))


# What does not fit.


@each_form
@ranks(2)
def test_pieces_of_another_wrapping_are_refused_and_names_may_miss(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, whole, use_orig_params)
    other, _ = wrapped_and_plain(Net, per_block, use_orig_params)
    expected = plain.state_dict()
    with pytest.raises(RuntimeError, match=r"elements .* of stem.bias .*torch\.distributed\.checkpoint"):
        load(model, SHARDED, take(other, SHARDED))
    with pytest.raises(RuntimeError, match=r"shift.*SHARDED_STATE_DICT"):
        model.load_state_dict(take(model, SHARDED))
    with pytest.raises(RuntimeError, match=r"_flat_param: .*fits only the ranks and wrapping"):
        load(model, LOCAL, take(other, LOCAL))
    for unlike in (take(model, LOCAL)["_flat_param"].piece.view(-1, 1), None):
        with pytest.raises(RuntimeError, match=r"_flat_param: .*fits only the ranks and wrapping"):
            load(model, LOCAL, {"_flat_param": unlike})
    with pytest.raises(RuntimeError, match="Missing key.*stem.weight"):
        load(model, SHARDED, {})
    state = take(model, SHARDED)
    state["stem.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="size mismatch for stem.weight"):
        load(model, SHARDED, state)
    assert_equal(model.state_dict(), expected)
    state = {name: value * 2 for name, value in take(model, SHARDED).items() if name != "stem.weight"}
    found = load(model, SHARDED, state | {"extra": torch.zeros(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["stem.weight"], ["extra"])
    doubled = {name: value * (1 if name == "stem.weight" else 2) for name, value in expected.items()}
    assert_equal(model.state_dict(), doubled)


@each_of_four
@ranks(2)
def test_a_module_that_fails_to_load_pieces_leaves_the_model_as_it_was(
    rank, world_size, wrap, use_orig_params
):
    model, plain = wrapped_and_plain(WithFailing, wrap, use_orig_params)
    (failing,) = (module for module in model.modules() if isinstance(module, Failing))
    state = {name: value * 0.9 for name, value in plain.state_dict().items()}
    failing.fails = True
    with pytest.raises(KeyError, match="of the user's own"):
        load(model, SHARDED, state)
    failing.fails = False
    found, expected = model.state_dict(), plain.state_dict()
    owned = [name for name in expected if wrap is not below_plain or name.startswith("blocks.1")]
    assert_equal({name: found[name] for name in owned}, {name: expected[name] for name in owned})
    load(model, SHARDED, state)
    assert_equal(model.state_dict(), state)


@ranks(2)
def test_refused_while_full_parameters_are_shown_or_a_state_dict_is_taken(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    for kind in (SHARDED, LOCAL):
        state = take(model, kind)
        with FSDP.summon_full_params(model):
            for call in (lambda kind=kind: take(model, kind), lambda args=(kind, state): load(model, *args)):
                with pytest.raises(RuntimeError, match="summon_full_params"):
                    call()
        load(model, kind, state)
    model = whole(copy.deepcopy(plain), use_orig_params=True)

    def run(*_: Any) -> None:
        model(torch.zeros(1, WIDTH, dtype=torch.float64))

    handle = model.module.head.register_state_dict_pre_hook(run)
    for kind in (FULL, SHARDED):
        with pytest.raises(RuntimeError, match="a state dict with the parameters of"):
            take(model, kind)
    handle.remove()
    assert_equal(model.state_dict(), plain.state_dict())


@ranks(2)
def test_local_state_dicts_have_one_flat_shard_per_segment(rank, world_size):
    net = Block()
    net.down.requires_grad_(False)
    for use_orig_params in (False, True):
        state = take(FSDP(copy.deepcopy(net), use_orig_params=use_orig_params), LOCAL)
        assert list(state) == ["_flat_param", "_flat_param_1"]
        assert all(value.dim() == 1 for value in state.values())
