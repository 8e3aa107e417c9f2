"""Full state dicts for one rank or for the host, sharded and local ones; pieces as torch's own tensors."""

import copy
import io
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardOfTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

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
from fsdp_wrap._params.interval_tensor import PASSES_FOR_DTENSOR, Intervals, boxes_of
from fsdp_wrap.distributed_state_dict import pieces_of_model
from state_nets import (
    FULL,
    LOCAL,
    MODELS,
    SHARDED,
    WIDTH,
    Block,
    Buffered,
    Net,
    assert_equal,
    below_plain,
    by_hand,
    changed,
    load,
    per_block,
    take,
    whole,
    wrapped_and_plain,
)

WAYS = [(whole, True), (per_block, False), (by_hand, True), (below_plain, False)]
"""Of wrapping, with a form of the wrapper."""


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.full_tensor() if isinstance(value, IntervalTensor) else value
        for name, value in state.items()
    }


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


@pytest.mark.parametrize("name", MODELS)
@ranks(3)
def test_every_kind_of_state_dict_has_the_values_of_the_plain_module(rank, world_size, name):
    """Full ones of the first rank alone; pieces without communication, also from a file to the other form."""
    # A tie between a wrapped module and a plain one above cannot last.
    for wrap, use_orig_params in WAYS[:3] if name in ("Tied", "Shared") else WAYS:
        model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        expected = plain.state_dict()
        owned = [key for key in expected if wrap is not below_plain or key.startswith(("stem", "blocks.1"))]
        state = take(model, FULL, FullStateDictConfig(True, rank0_only=True))
        # What no instance wraps is on every rank.
        assert_equal(state, {key: value for key, value in expected.items() if rank == 0 or key not in owned})
        with count_collectives() as counts:
            pieces = {kind: take(model, kind) for kind in (SHARDED, LOCAL)}
        assert counts == {}
        assert_equal(full(pieces[SHARDED]), expected)
        params = {key for key, _ in plain.named_parameters(remove_duplicate=False)}
        for key, value in pieces[SHARDED].items():
            is_cut = key.removesuffix("_doubled") in params and key in owned
            assert isinstance(value, IntervalTensor) == is_cut, key
        assert_equal(model.state_dict(), expected)
        target, _ = wrapped_and_plain(MODELS[name], wrap, not use_orig_params)
        for kind, state in pieces.items() if name != "Hooked" else ():
            target.load_state_dict(changed(expected))
            stored = io.BytesIO()
            torch.save(state, stored)
            stored.seek(0)
            read = torch.load(stored, weights_only=True)
            with count_collectives() as counts:
                assert str(load(target, kind, read)) == "<All keys matched successfully>"
            assert counts == {}
            assert_equal(target.state_dict(), expected)


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
                own, expected = (getattr(held, "piece", held) for held in (state[name], value))
                assert torch.equal(own, expected), name


class Chain(nn.Module):
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


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (2, 3, 2, 3), (0, 3), (5, 1, 2)])
def test_boxes_cover_every_interval_once(shape):
    numel = torch.Size(shape).numel()
    values = torch.arange(numel)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        covered = torch.full(shape, -1)
        boxes = list(boxes_of(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box in boxes:
            part = covered[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes))]
            assert box.numel > 0 or numel == 0
            assert (part == -1).all(), "twice"
            part.copy_(values[box.first : box.first + box.numel].view(box.sizes))
        expected = torch.full((numel,), -1)
        expected[start:stop] = values[start:stop]
        assert torch.equal(covered.flatten(), expected)


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
    shard = ShardOfTensor.from_tensor_and_offsets(part, [rows[0], 0], rank)
    return init_from_local_shards([shard], *value.shape)


@each_form
@ranks(2)
def test_pieces_of_another_wrapping_are_refused_and_names_may_miss(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, whole, use_orig_params)
    other, _ = wrapped_and_plain(Net, per_block, use_orig_params)
    expected = plain.state_dict()
    pieces = take(model, SHARDED)
    flat = r"_flat_param: .*fits only the ranks and wrapping"
    state: Any
    for kind, state, words in (
        (SHARDED, take(other, SHARDED), r"elements .* of stem.bias .*torch\.distributed\.checkpoint"),
        (FULL, pieces, "shift.*SHARDED_STATE_DICT"),
        (LOCAL, take(other, LOCAL), flat),
        (LOCAL, {"_flat_param": take(model, LOCAL)["_flat_param"].piece.view(-1, 1)}, flat),
        (LOCAL, {"_flat_param": None}, flat),
        (SHARDED, {}, "Missing key.*stem.weight"),
        (SHARDED, pieces | {"stem.weight": torch.zeros(2, 2)}, "size mismatch for stem.weight"),
    ):
        with pytest.raises(RuntimeError, match=words):
            load(model, kind, state)
    assert_equal(model.state_dict(), expected)
    state = {name: value * 2 for name, value in take(model, SHARDED).items() if name != "stem.weight"}
    keys = load(model, SHARDED, state | {"extra": torch.zeros(1)}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["stem.weight"], ["extra"])
    doubled = {name: value * (1 if name == "stem.weight" else 2) for name, value in expected.items()}
    assert_equal(model.state_dict(), doubled)


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


@pytest.mark.parametrize(
    ("strategy", "with_mesh", "use_orig_params"),
    [
        ("FULL_SHARD", False, False),
        ("HYBRID_SHARD", False, True),
        ("HYBRID_SHARD", True, False),
        ("NO_SHARD", True, True),
    ],
)
@ranks(4)
def test_as_dtensors(rank, world_size, strategy, with_mesh, use_orig_params):
    mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,)) if with_mesh else None
    plain = Block().double()
    model = FSDP(
        copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
        use_orig_params=use_orig_params,
    )
    others = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    with count_collectives() as counts:
        state = pieces_of_model(model)
        for value in state.values():
            assert isinstance(value, IntervalTensor) and isinstance(value, DTensor) == PASSES_FOR_DTENSOR
            assert value.device_mesh == (mesh or value.device_mesh)
            assert len(value.placements) == value.device_mesh.ndim
            assert value.to_local().numel() == value.piece.numel() == value._local_tensor.numel()
            same = value.redistribute(placements=value.placements)
            assert same.placements == value.placements and torch.equal(same.to_local(), value.to_local())
    assert counts == {}
    for name, expected in plain.state_dict().items():
        assert torch.equal(state[name].full_tensor(), expected), name
        ndim = state[name].device_mesh.ndim
        last = Shard(0) if expected.dim() else Replicate()
        placed = state[name].redistribute(placements=[*[Replicate()] * (ndim - 1), last])
        assert type(placed) is DTensor and torch.equal(placed.full_tensor(), expected), name
        for other in others:
            converted = state[name].to_dtensor(other)
            assert type(converted) is DTensor and converted.device_mesh == other
            assert torch.equal(converted.full_tensor(), expected), name
        if strategy == "NO_SHARD":
            assert set(state[name].placements) == {Replicate()}
            assert torch.equal(state[name].to_local(), expected), name


@ranks(2)
def test_placements_and_operations_of_pieces(rank, world_size):
    """They are rows where every rank has just these; pieces made by hand are over all ranks."""
    for shape, by_rows in (((6, 4), True), ((3, 3), False), ((4,), True), ((5, 4), False)):
        model = FSDP(nn.ParameterList([nn.Parameter(torch.randn(shape))]))
        (value,) = take(model, SHARDED).values()
        (placement,) = value.placements
        full = value.full_tensor()
        if by_rows:
            assert placement == Shard(0) and torch.equal(value.to_local(), full.chunk(2)[rank])
        else:
            assert placement == Intervals() != Shard(0) and not placement.is_shard()
            assert value.to_local().dim() == 1
        assert value.dim() == len(shape) and value.piece.numel() == value.to_local().numel()
    other = DTensor.from_local(torch.ones(5, 4), value.device_mesh, [Replicate()])
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        other.copy_(value)
    with pytest.raises(AttributeError, match="use full_tensor"):
        _ = value._spec

    value = IntervalTensor(torch.Size((2, 5)), 5 * rank, torch.arange(5.0) + 5 * rank)
    assert torch.equal(value.full_tensor(), torch.arange(10.0).view(2, 5))
    assert value.device_mesh == DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert value.placements == (Intervals(),)
    assert sum(shard.tensor.numel() for shard in value.local_shards()) == 5
    for gone in ("local_tensor", "metadata"):
        with pytest.raises(AttributeError, match=f"'{gone}': it is gone since 0.2.*(boxes|to_local)"):
            getattr(value, gone)
    assert torch.equal((value * 2 + value).piece, 3 * value.piece)
    assert value.to(torch.bfloat16).piece.dtype == torch.bfloat16
    assert (value.clone().start, value.clone().shape) == (5 * rank, (2, 5))
    total = value.piece.sum()
    assert copy.deepcopy(value).mul_(2).piece.sum() == 2 * total and value.piece.sum() == total
    for action in (value.sum, lambda: torch.ones(2, 5).copy_(value), lambda: value.add_(torch.ones(2, 5))):
        with pytest.raises(TypeError, match="full_tensor|cannot combine"):
            action()
    here, there = f"elements {5 * rank} to {5 * rank + 5}", "elements 1 to 6"
    with pytest.raises(ValueError, match=f"{there} do not match {here}"):
        value.add_(IntervalTensor(torch.Size((2, 5)), 1, torch.arange(5.0)))
