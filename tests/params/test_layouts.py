"""The contracts of `Layout` and `ShardedParams`, and what flat parameters, slices and DTensors do.

No process is needed: the shards of all ranks are made here one after the other, and what would travel
between them is put together by hand. All else is tested in one form of a model.
"""

import functools
import gc
import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_wrap import FullyShardedDataParallel, fully_shard
from fsdp_wrap._comm.process_group import Communicator
from fsdp_wrap._core.modules import ParamPlaces, ParamSlot
from fsdp_wrap._params import (
    DataMesh,
    DTensorParams,
    FlatParameter,
    JointParams,
    ShardedParams,
    SliceParams,
    segment,
    to_local,
)
from fsdp_wrap._params.shard_gradients import GradientMarks
from fsdp_wrap._runtime import units_in
from params.fake_ranks import fake_ranks

SHAPES = {
    "matrix": (7, 5),
    "narrow": (2, 3),
    "empty": (0, 4),
    "cube": (4, 2, 3),
    "one": (1,),
    "vector": (11,),
}
KINDS = ["flat", "slices", "dtensor"]
each_kind = pytest.mark.parametrize("kind", KINDS)
FLAT = "_flat_param"


class OneOf(Communicator):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, torch.device("cpu"))


class Held(nn.Module):
    """Parameters of many shapes, of which all numbers differ; the first is shown in two places."""

    def __init__(self, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        numbers = itertools.count(1.0)
        for name, shape in shapes.items():
            values = [next(numbers) for _ in range(torch.Size(shape).numel())]
            setattr(self, name, nn.Parameter(torch.tensor(values, dtype=dtype).view(shape)))
            getattr(self, name).told = f"of {name}"
        self.below = nn.Module()
        self.below.register_parameter("again", self._parameters[next(iter(shapes))])


class Ranks:
    def __init__(
        self,
        kind: str,
        size: int,
        dtype: torch.dtype = torch.float64,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        dims: Sequence[int] = (),
        sharded: bool = True,
    ) -> None:
        self.size = size
        self.originals = [param.detach() for param in Held(dtype, shapes).parameters()]
        self.modules = [Held(dtype, shapes) for _ in range(size)]
        self.originals_of = [[*module.parameters()] for module in self.modules]
        self.params: list[Any] = []
        for rank, module in enumerate(self.modules):
            slots = [ParamSlot(name, getattr(module, name), ParamPlaces(module)) for name in shapes]
            for slot in slots:
                slot.places.add(module, slot.fqn)
            slots[0].places.add(module.below, "again")
            communicator = OneOf(rank, size) if sharded else OneOf(0, 1)
            with fake_ranks(rank, size):
                self.params.append(_sharded(kind, slots, communicator, module, dims, sharded))

    @property
    def travelling(self) -> torch.Tensor:
        buffers = [torch.full((param.layout.shard_numel,), 9.0, dtype=param.dtype) for param in self.params]
        for sharded, buffer in zip(self.params, buffers):
            sharded.write_shard(buffer)
        return torch.cat(buffers)

    def reduce(self, grads: Sequence[Sequence[Any]], frozen: bool = False) -> None:
        """Sums gradients of all parameters on all ranks, None for those without, and adds the sums."""
        buffers = [torch.zeros(sharded.layout.numel, dtype=sharded.dtype) for sharded in self.params]
        used = [[grad is not None for grad in of_rank] for of_rank in grads]
        for sharded, buffer, mine, of_rank in zip(self.params, buffers, used, grads):
            for index, (boxes, grad) in enumerate(zip(sharded.layout.parts(buffer), of_rank)):
                value = self.originals[index].detach() * 0 - 0.0 if grad is None else grad
                for box, part in zip(boxes, sharded.layout.split(index, value)):
                    box.copy_(torch.full_like(part, -0.0) if grad is None else part)
            sharded.layout.note_used(sharded.layout.notes(buffer), mine)
        shards = [chunk.clone() for chunk in functools.reduce(operator.add, buffers).chunk(self.size)]
        for sharded, shard, mine in zip(self.params, shards, used):
            asked = [frozen or source.requires_grad for source in sharded.sources]
            sharded.gradients.add(shard, sharded.layout.used_by_any(shard, mine, asked))

    def gradients(self) -> list[Any]:
        pieces = [[grad.reshape(-1) for grad in of_all if grad is not None] for of_all in self._grads()]
        return [torch.cat(own) if own else None for own in pieces]

    def _grads(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(sharded.gradients.pieces() for sharded in self.params))


def _sharded(
    kind: str, slots: Any, communicator: Any, module: Any, dims: Any, sharded: bool
) -> ShardedParams:
    if kind != "dtensor":
        make = JointParams if kind == "flat" else SliceParams
        return make(slots, communicator, name=FLAT, module=module, sharded=sharded, offload=False)
    mesh = DataMesh(DeviceMesh("cpu", torch.arange(dist.get_world_size())), only_copies=not sharded)
    dims = dims or [0] * len(slots)
    return DTensorParams(slots, communicator, mesh=mesh, dims=dims, name="", offload=False, pin=False)


def shown(module: Any) -> list[Any]:
    return [*(getattr(module, name) for name in SHAPES), module.below.again]


# where elements lie


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("kind", [*KINDS, "columns", "even"])
def test_the_shards_of_all_ranks_side_by_side_are_what_travels(kind, size):
    dims = (1, 1, 1, 2, 0, 0) if kind == "columns" else ()
    shapes = {"even": (size, 3), "other": (2 * size,)} if kind == "even" else SHAPES
    ranks = Ranks(kind if kind in KINDS else "dtensor", size, dims=dims, shapes=shapes)
    travelling = ranks.travelling
    for sharded in ranks.params:
        layout = sharded.layout
        assert travelling.numel() == layout.numel == layout.shard_numel * size
        full = layout.unpack(travelling)
        assert (full is travelling) == layout.in_place == (kind in ("flat", "slices") or size == 1)
        assert full.numel() == layout.full_numel and full.numel() % size == 0
        assert torch.equal(layout.pack(full), travelling)
        for index, (view, original) in enumerate(zip(layout.views(full), ranks.originals)):
            assert torch.equal(view, original)
            assert view.storage_offset() * 8 % 16 == 0, "kernels round otherwise where less is aligned"
            pairs = zip(layout.parts(travelling)[index], layout.split(index, original), strict=True)
            assert all(torch.equal(box, part) for box, part in pairs)
        assert [(extent.fqn, extent.shape) for extent in layout.extents] == [
            (name, torch.Size(shape)) for name, shape in shapes.items()
        ]
        for dtype, given in (
            (sharded.dtype, sharded.dtype),
            (torch.bfloat16, sharded.dtype),
            (torch.bfloat16,) * 2,
        ):
            packed = torch.full((layout.numel,), 7.0, dtype=dtype)
            layout.packer(packed)([source.to(given) for source in ranks.originals])
            notes = packed.view(size, -1)[:, layout.shard_numel - layout.noted_numel :]
            assert bool((notes == 1).all()), "all parameters are used"
            notes.zero_()
            assert torch.equal(packed, travelling.to(dtype)), "padding was not zeroed"
        gaps = sum(gap.numel() for gap in layout.padding(travelling))
        assert gaps + size * layout.noted_numel == layout.padding_numel
        assert layout.padding_numel == layout.numel - sum(map(torch.numel, ranks.originals))


HELD = {
    # of three rows of two, and of two numbers, by two ranks
    "flat": [[[1, 2, 3, 4, 5], []], [[6], [7, 8]]],
    "slices": [[[1, 2, 3, 4, 5], []], [[6], [7, 8]]],
    "dtensor": [[[1, 2, 3, 4], [7]], [[5, 6], [8]]],
}
NUMELS = {"flat": 10, "slices": 10, "dtensor": 14}  # to the alignment; two notes on each rank


@each_kind
def test_which_elements_a_rank_holds(kind):
    ranks = Ranks(kind, 2, torch.float32, {"weight": (3, 2), "bias": (2,)})
    for sharded, held in zip(ranks.params, HELD[kind]):
        assert [interval.data.tolist() for interval in sharded.intervals()] == held
        assert sharded.layout.numel == NUMELS[kind]
    assert ranks.params[0].layout.extents[1].start == 8
    assert Ranks(kind, 2, torch.bfloat16, {"a": (3,), "b": (2,)}).params[0].layout.extents[1].start == 8


@pytest.mark.parametrize("size", [1, 2, 5])
@each_kind
def test_intervals_tell_what_ranks_hold_in_their_order(kind, size):
    ranks = Ranks(kind, size)
    intervals = [sharded.intervals() for sharded in ranks.params]
    for index, original in enumerate(ranks.originals):
        of_all = [of_rank[index] for of_rank in intervals if of_rank[index].data.numel()]
        assert [piece.start for piece in of_all[1:]] == [piece.stop for piece in of_all[:-1]]
        assert sum(piece.data.numel() for piece in of_all) == original.numel()
        assert all(torch.equal(of_rank[index].own(original), of_rank[index].data) for of_rank in intervals)
    for rank, (sharded, own) in enumerate(zip(ranks.params, intervals)):
        assert [counts[rank] for counts in sharded.layout.held_by_rank()] == [
            piece.data.numel() for piece in own
        ]
        for interval, source, original in zip(own, sharded.sources, ranks.originals):
            assert interval.source is source and interval.fqn in SHAPES
            like_source = original if kind == "dtensor" else source.detach()
            assert torch.equal(interval.within(like_source), interval.data)
            assert interval.shape == interval.held_shape == SHAPES[interval.fqn]
            interval.data.mul_(2)
    layout = ranks.params[0].layout
    assert torch.equal(layout.views(layout.unpack(ranks.travelling))[0], 2 * ranks.originals[0])


@pytest.mark.parametrize("kind", ["flat", "slices"])
def test_one_element_takes_no_more_than_itself(kind):
    ranks = Ranks(kind, 2, torch.float32, {"one": (1,)})
    assert [sharded.layout.shard_numel for sharded in ranks.params] == [1, 1]
    assert [sharded.intervals()[0].data.numel() for sharded in ranks.params] == [1, 0]


@each_kind
def test_units_of_the_same_shapes_share_their_geometry_as_long_as_one_lives(kind):
    one, two, lower = Ranks(kind, 2), Ranks(kind, 2), Ranks(kind, 2, torch.bfloat16)
    for rank, (first, second, other) in enumerate(zip(one.params, two.params, lower.params)):
        assert first.layout.extents is second.layout.extents
        assert first.layout.extents is not other.layout.extents, "they begin at other elements"
        assert first.layout.rank == rank
    held = weakref.ref(first.layout if kind == "dtensor" else first.layout.even)
    del one, first
    gc.collect()
    assert held() is not None
    del two, second
    gc.collect()
    assert held() is None


def test_columns_are_no_intervals():
    sharded = Ranks("dtensor", 2, dims=(1, 1, 1, 2, 0, 0)).params[0]
    for ask in (sharded.intervals, sharded.layout.held_by_rank):
        with pytest.raises(ValueError, match="'matrix' is cut along dimension 1.*save it as the DTensor"):
            ask()


# what modules show


@each_kind
def test_what_modules_show(kind):
    ranks = Ranks(kind, 3)
    for sharded, module, params in zip(ranks.params, ranks.modules, ranks.originals_of):
        assert [*module._parameters] == [*SHAPES, *([FLAT] if kind == "flat" else [])]
        pieces = sharded.layout.pieces(sharded.flat_param.data)
        for value, param, piece in zip(shown(module), params, pieces):
            assert to_local(param).data_ptr() == piece.data_ptr() or not piece.numel(), "memory is kept"
            assert torch.equal(to_local(value).reshape(-1), piece)
            if kind == "dtensor":
                assert isinstance(value, DTensor) and value.placements == (Shard(0),)
                assert value.told == param.told
            else:
                assert type(value) is torch.Tensor if kind == "flat" else value is param
        assert shown(module)[0] is module.below.again
        if kind == "flat":
            assert type(module._parameters[FLAT]) is FlatParameter is type(sharded.flat_param)
            assert sharded.flat_param._fqns == tuple(SHAPES)
            assert sharded.flat_param._shapes == (*SHAPES.values(),)
            with pytest.raises(ValueError, match="FlatParameter of 'matrix' and others would never be"):
                sharded.flat_param.register_hook(print)
        assert sharded.display.is_untouched()
        leaves = sharded.make_leaves(sharded.layout.unpack(ranks.travelling))
        sharded.display.leaves.show()
        for name, value, leaf, original in zip(SHAPES, shown(module), leaves, ranks.originals):
            assert value is leaf and type(value) is nn.Parameter and torch.equal(value, original)
            assert value.told == f"of {name}" and not value.requires_grad
        assert module.below.again is leaves[0] and not sharded.display.is_untouched()
        sharded.display.show_sharded()
        sharded.display.cover()
        assert module.below.again is leaves[0] and sharded.display.is_untouched()
        sharded.display.uncover()
        assert module.below.again is not leaves[0]
        other = nn.Module()
        other.register_parameter("lent", None)
        sharded.add_place(5, (other, "lent"))
        assert other.lent is module.vector
        sharded.display.leaves.show()
        assert other.lent is module.vector is leaves[5]


# gradients


def numbers(size: int) -> list[list[torch.Tensor | None]]:
    """Of two ranks or more: the second parameter is used by the last rank alone, the fourth by nobody."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[list[Any]] = [
        [torch.randint(-9, 9, shape, generator=generator).double() for shape in SHAPES.values()]
        for _ in range(size)
    ]
    for rank, of_rank in enumerate(drawn):
        of_rank[1] = of_rank[1] if rank == size - 1 else None
        of_rank[3] = None
        of_rank[4] = of_rank[4] * 0 - 0.0  # used: a zero without a sign counts
    return drawn


@pytest.mark.parametrize("size", [1, 2, 5])
@each_kind
def test_sums_reach_the_shards_of_what_any_rank_has_used(kind, size):
    ranks, drawn = Ranks(kind, size), numbers(size)
    sums = [
        sum((grad for grad in of_all if grad is not None), torch.zeros(original.shape)).reshape(-1)
        for original, of_all in zip(ranks.originals, zip(*drawn))
    ]
    for times in (1, 2):
        ranks.reduce(drawn)
        for name, total, expected in zip(SHAPES, ranks.gradients(), sums):
            assert (
                total is None if name == "cube" and kind != "flat" else torch.equal(total, times * expected)
            )
    for rank, sharded in enumerate(ranks.params):
        present = [source.grad is not None for source in sharded.sources]
        filled = [held[rank] > 0 for held in sharded.layout.held_by_rank()]
        if kind == "flat":
            assert present == [True] * 6
        elif kind == "dtensor":
            assert present == [True, True, True, False, True, True], "also of what this rank has no rows of"
            assert all(
                source.grad.placements == (Shard(0),) for source in sharded.sources if source.grad is not None
            )
        else:
            used = [True, True, True, False, True, True]
            assert present == [*map(operator.and_, used, [*filled[:2], True, *filled[3:]])]
        written = torch.full((sharded.layout.shard_numel,), 9.0, dtype=sharded.dtype)
        sharded.gradients.write_to(written)
        held = [grad for grad in sharded.gradients.pieces() if grad is not None]
        assert sum(grad.square().sum() for grad in held) == written.square().sum()
        if kind != "dtensor":
            joint = sharded.flat_param.grad
            assert torch.equal(joint, written) if any(map(operator.and_, present, filled)) else joint is None


def _memories(sharded):
    """The sum of all gradients, and the number of memories that they lie in."""
    held = [grad for grad in sharded.gradients.pieces() if grad is not None and grad.numel()]
    return {sum(grad.sum().item() for grad in held): len({grad.untyped_storage()._cdata for grad in held})}


@each_kind
def test_gradients_of_one_reduction_lie_in_one_memory(kind):
    ranks = Ranks(kind, 2)
    ranks.reduce([[torch.ones(shape) for shape in SHAPES.values()]] * 2)
    for sharded in ranks.params:
        total = 2 * sum(map(torch.numel, sharded.layout.pieces(sharded.flat_param.data)))
        assert _memories(sharded) == {total: 1}
        filled = [param for param in sharded.sharded_params if to_local(param).numel()]
        filled[-1].grad = filled[-1].grad.clone()
        if kind == "slices":
            assert _memories(sharded) == {total: 2}
            assert sharded.gradients.joint().sum() == total
            assert _memories(sharded) == {total: 1}, "they are put together"


@each_kind
def test_who_used_what_is_known_where_it_must_be(kind):
    """Nobody asks for what is frozen unless it was used before; notes may be made of what lost them."""
    for frozen in (False, True):
        ranks = Ranks(kind, 2)
        for source in (source for sharded in ranks.params for source in sharded.sources):
            source.requires_grad_(kind == "flat")
        ranks.reduce(numbers(2), frozen)
        told = [sharded.gradients.pieces()[1] is not None for sharded in ranks.params]
        held = [held > 0 for held in ranks.params[0].layout.held_by_rank()[1]]
        if frozen or kind == "flat":
            assert told == (held if kind == "slices" else [True, True])
        else:
            assert not told[0]
    for sharded in ranks.params:
        shard = torch.zeros(sharded.layout.shard_numel, dtype=sharded.dtype)
        wanted = [True, False, True, True, False, True]
        sharded.layout.note_in_shard(shard, wanted)
        used = sharded.layout.used_by_any(shard, [False] * 6, [True] * 6)
        pieces = [piece.numel() > 0 for piece in sharded.layout.pieces(shard)]
        if kind == "flat":
            assert any(used)
        else:
            assert [*used] == (wanted if kind == "dtensor" else [*map(operator.and_, wanted, pieces)])


@each_kind
def test_gradients_are_replaced_where_they_change(kind):
    ranks = Ranks(kind, 2)
    ranks.reduce(numbers(2))
    for sharded in ranks.params:
        own = torch.zeros(sharded.layout.shard_numel, dtype=sharded.dtype)
        sharded.gradients.write_to(own)
        before = [source.grad for source in sharded.sharded_params]
        versions = [grad if grad is None else to_local(grad)._version for grad in before]
        present = [grad is not None for grad in sharded.gradients.pieces()]
        sharded.gradients.replace(own, present)
        assert [source.grad for source in sharded.sharded_params] == before or kind == "dtensor"
        for source, grad, version in zip(sharded.sharded_params, before, versions):
            assert source.grad is grad and (grad is None or to_local(grad)._version == version)
        sharded.gradients.replace(2 * own, present)
        written = torch.zeros_like(own)
        sharded.gradients.write_to(written)
        assert torch.equal(written, 2 * own)
        sharded.gradients.replace(own, [True, *[False] * 5])
        assert sharded.sharded_params[0].grad is not None or (
            kind == "slices" and not sharded.layout.even.updated[0]
        )
        assert all(source.grad is None for source in sharded.sharded_params[1:])
        sharded.gradients.replace(None, [True] * 6)
        assert all(source.grad is None for source in sharded.sharded_params)


@each_kind
def test_zeroing_is_told_from_nothing(kind):
    sharded = Ranks(kind, 2).params[0]
    first, *others = sharded.sharded_params
    first.requires_grad_(True)
    sharded.gradients.mark_unsynced()
    assert not any(sharded.gradients.zeroed()) and first.grad is not None, "a mark, by which zeroing is seen"
    for write in (lambda grad: grad.mul_(0.5), lambda grad: grad.add_(1)):  # scaled zeros stay negative
        write(to_local(first.grad))
        with pytest.warns(UserWarning, match=r"^the gradient of '.+' was scaled or written to"):
            assert not any(sharded.gradients.zeroed()), "it was written to, and not zeroed"
    first.grad.zero_()
    assert sharded.gradients.zeroed() == ([True] * 6 if kind == "flat" else [True, *[False] * 5])
    for source in others:
        source.grad = None
    assert sharded.gradients.zeroed()[:2] == [True, True]
    sharded.gradients.add(torch.zeros(sharded.layout.shard_numel, dtype=sharded.dtype), [False] * 6)
    assert all(source.grad is None for source in others)
    sharded.gradients.mark_unsynced()
    for source in sharded.sources:
        source.grad = None
    assert all(sharded.gradients.zeroed())
    sharded.gradients.add(torch.zeros(sharded.layout.shard_numel, dtype=sharded.dtype), [False] * 6)
    assert all(source.grad is None for source in sharded.sources), "what no rank has used has no gradient"
    sharded.gradients.mark_unsynced()
    sharded.gradients.add(torch.zeros(sharded.layout.shard_numel, dtype=sharded.dtype), [False] * 6)
    assert all(source.grad is None for source in sharded.sources), "marks go with the next sum"
    sharded.gradients.mark_partial()
    marked = [source.grad is not None for source in sharded.sources]
    assert marked == (
        [True] * 6 if kind == "flat" else [extent.fqn == "empty" for extent in sharded.layout.extents]
    )
    assert not sharded.gradients.zeroed_partial()
    sharded.sources[2].grad = None
    assert sharded.gradients.zeroed_partial()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_marks_of_all_dtypes_tell_zeroing(dtype):
    marks, param = GradientMarks(), nn.Parameter(torch.ones(3, dtype=dtype))
    marks.put([param])
    assert marks.zeroed([param]) == [False] and param.grad is not None
    param.grad.mul_(0.5)
    assert marks.zeroed([param]) == [False]
    param.grad.zero_()
    assert marks.zeroed([param]) == [True]


def test_gradients_take_another_dtype_with_their_values():
    sharded = Ranks("dtensor", 2).params[0]
    first, second, *_ = sharded.sources
    first.grad = torch.full_like(first, 3.0)
    sharded.gradients.take_dtype(torch.float32)
    assert second.grad is None and {param.grad_dtype for param in sharded.sources} == {torch.float32}
    assert first.grad.dtype == torch.float32 and (to_local(first.grad) == 3).all()


def test_data_that_do_not_fit_are_refused():
    flat, (sharded, _) = (Ranks(kind, 2).params for kind in ("flat", "slices"))
    flat[0].flat_param.data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"FlatParameter of 'matrix' and others .*\(3,\); they must keep"):
        flat[0].follow_replaced()
    kept = sharded.sources[0].data
    for data, name in ((torch.zeros(2, dtype=torch.float64), "matrix"), (kept.float(), "narrow")):
        sharded.sources[0].data = data
        with pytest.raises(ValueError, match=f"parameter '{name}'.*must keep.*the dtype of 'matrix'"):
            sharded.follow_replaced()
    sharded.sources[0].data = kept.clone().mul_(2)
    assert sharded.follow_replaced() and torch.equal(sharded.intervals()[0].data, kept * 2)


def test_a_dtensor_that_is_put_in_the_place_of_another_is_followed():
    ranks = Ranks("dtensor", 2)
    sharded, module = ranks.params[0], ranks.modules[0]
    source = sharded.sources[0]
    plain, low = nn.Parameter(torch.zeros(7, 5).double()), nn.Parameter(source.detach().float())
    for other, said in (
        (plain, "'matrix' was replaced by a Parameter"),
        (low, "'narrow' .*of one dtype with"),
    ):
        module._parameters["matrix"] = other
        with pytest.raises(ValueError, match=said):
            sharded.follow_replaced()
    module._parameters["matrix"] = taken = nn.Parameter(source.detach() * 2)
    assert sharded.follow_replaced() and sharded.sources[0] is taken is module.below.again
    assert torch.equal(sharded.intervals()[0].data, ranks.originals[0].detach()[:4].reshape(-1) * 2)
    module._parameters["matrix"] = None
    assert not sharded.follow_replaced(), "what was removed is refused elsewhere"


def test_units_of_the_same_shapes_share_what_has_no_values():
    with fake_ranks(0, 2):
        mesh, equal = (init_device_mesh("cpu", (2,)) for _ in range(2))
        models = [fully_shard(nn.Linear(3, 4), mesh=one) for one in (mesh, mesh, equal)]
        models.append(fully_shard(nn.Linear(3, 4).bfloat16(), mesh=mesh))
        first, second, apart, low = (units_in(model)[""].params[0]._specs for model in models)
        assert first is second and first[0] is not first[1]
        assert mesh == equal and apart is not first
        assert apart[0].mesh is equal, "its process groups are others"
        assert low[0].tensor_meta.dtype is torch.bfloat16
        for use_orig_params in (False, True):
            units = [
                FullyShardedDataParallel(nn.Linear(3, size), use_orig_params=use_orig_params)
                for size in (4, 4, 5)
            ]
            cuts = [unit._unit.params[0].layout.even for unit in units]
            assert cuts[0] is cuts[1] is not cuts[2]


def test_a_unit_at_rest_has_memory_for_its_shard_alone():
    made: list[int] = []
    make = Communicator.buffer

    def noted(self: Any, numel: int, dtype: torch.dtype) -> Any:
        made.append(numel)
        return make(self, numel, dtype)

    with fake_ranks(0, 2), mock.patch.object(Communicator, "buffer", noted):
        model = fully_shard(nn.Linear(4, 4))
        gathered = len(made)
        assert gathered == 2, "for what is gathered, and for the full parameters"
        model(torch.zeros(1, 4))
        assert len(made) == gathered
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            assert len(made) == gathered + 1, "for gradients, once"


def test_full_memory_is_free_before_that_of_gradients_is_made():
    buffers: list[Any] = []
    held: list[int] = []
    make, gradients = segment.Segment._make_buffers, segment.Gradients

    def noted(self: Any) -> Any:
        buffers[:] = make(self)
        return buffers

    def looking(*args: Any) -> Any:
        held.append(sum(buffer.data.untyped_storage().nbytes() for buffer in buffers))
        return gradients(*args)

    with fake_ranks(0, 2), mock.patch.object(segment.Segment, "_make_buffers", noted):
        with mock.patch.object(segment, "Gradients", looking):
            for size in (8, 9):  # cut evenly, and not: then what travels has memory of its own
                fully_shard(nn.Linear(3, size))
    assert held == [0, 0] and buffers[0] is not buffers[1]
