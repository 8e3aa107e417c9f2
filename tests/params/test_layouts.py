"""The contract of `Layout`, and what the three layouts do differently: flat, slices and DTensors.

No process is needed: the layouts of all ranks are made here one after the other, and what would travel
between them is put together by hand. All else is tested in one form of a model.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_wrap import fully_shard
from fsdp_wrap._comm.process_group import Communicator
from fsdp_wrap._core.modules import ParamPlaces, ParamSlot
from fsdp_wrap._params import (
    DataMesh,
    DTensorLayout,
    FlatParameter,
    FlatParameterLayout,
    Layout,
    SliceLayout,
    segment,
    to_local,
)
from fsdp_wrap._params.zero_marks import GradientMarks
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
        self.params = [[*module.parameters()] for module in self.modules]
        self.layouts: list[Any] = []
        for rank, module in enumerate(self.modules):
            slots = [ParamSlot(name, getattr(module, name), ParamPlaces(module)) for name in shapes]
            for slot in slots:
                slot.places.add(module, slot.fqn)
            slots[0].places.add(module.below, "again")
            communicator = OneOf(rank, size) if sharded else OneOf(0, 1)
            with fake_ranks(rank, size):
                self.layouts.append(_layout(kind, slots, communicator, module, dims, sharded))

    @property
    def travelling(self) -> torch.Tensor:
        buffers = [torch.full((each.shard_numel,), 9.0, dtype=each.dtype) for each in self.layouts]
        for layout, buffer in zip(self.layouts, buffers):
            layout.write_shard(buffer)
        return torch.cat(buffers)

    def reduce(self, grads: Sequence[Sequence[Any]], frozen: bool = False) -> None:
        """Sums gradients of all parameters on all ranks, None for those without, and adds the sums."""
        buffers = [torch.zeros(layout.numel, dtype=layout.dtype) for layout in self.layouts]
        used = [[grad is not None for grad in of_rank] for of_rank in grads]
        for layout, buffer, mine, of_rank in zip(self.layouts, buffers, used, grads):
            for index, (boxes, grad) in enumerate(zip(layout.parts(buffer), of_rank)):
                value = self.originals[index].detach() * 0 - 0.0 if grad is None else grad
                for box, part in zip(boxes, layout.split(index, value)):
                    box.copy_(torch.full_like(part, -0.0) if grad is None else part)
            layout.note_used(layout.notes(buffer), mine)
        shards = [each.clone() for each in functools.reduce(operator.add, buffers).chunk(self.size)]
        for layout, shard, mine in zip(self.layouts, shards, used):
            layout.add_reduced(shard, layout.used_by_any(shard, mine, frozen))

    def gradients(self) -> list[Any]:
        pieces = [[each.reshape(-1) for each in of_all if each is not None] for of_all in self._grads()]
        return [torch.cat(each) if each else None for each in pieces]

    def _grads(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(layout.gradients() for layout in self.layouts))


def _layout(kind: str, slots: Any, communicator: Any, module: Any, dims: Any, sharded: bool) -> Layout:
    if kind != "dtensor":
        make = FlatParameterLayout if kind == "flat" else SliceLayout
        return make(slots, communicator, name=FLAT, module=module, sharded=sharded, offload=False)
    mesh = DataMesh(DeviceMesh("cpu", torch.arange(dist.get_world_size())), only_copies=not sharded)
    dims = dims or [0] * len(slots)
    return DTensorLayout(slots, communicator, mesh=mesh, dims=dims, name="", offload=False, pin=False)


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
    for layout in ranks.layouts:
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
            (layout.dtype, layout.dtype),
            (torch.bfloat16, layout.dtype),
            (torch.bfloat16,) * 2,
        ):
            packed = torch.full((layout.numel,), 7.0, dtype=dtype)
            layout.packer(packed)([each.to(given) for each in ranks.originals])
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
    for layout, held in zip(ranks.layouts, HELD[kind]):
        assert [interval.data.tolist() for interval in layout.intervals()] == held
        assert layout.numel == NUMELS[kind]
    assert ranks.layouts[0].extents[1].start == 8
    assert Ranks(kind, 2, torch.bfloat16, {"a": (3,), "b": (2,)}).layouts[0].extents[1].start == 8


@pytest.mark.parametrize("size", [1, 2, 5])
@each_kind
def test_intervals_tell_what_ranks_hold_in_their_order(kind, size):
    ranks = Ranks(kind, size)
    intervals = [layout.intervals() for layout in ranks.layouts]
    for index, original in enumerate(ranks.originals):
        of_all = [each[index] for each in intervals if each[index].data.numel()]
        assert [each.start for each in of_all[1:]] == [each.stop for each in of_all[:-1]]
        assert sum(each.data.numel() for each in of_all) == original.numel()
        assert all(torch.equal(each[index].own(original), each[index].data) for each in intervals)
    for rank, (layout, own) in enumerate(zip(ranks.layouts, intervals)):
        assert [each[rank] for each in layout.held_by_rank()] == [each.data.numel() for each in own]
        for interval, source, original in zip(own, layout.sources, ranks.originals):
            assert interval.source is source and interval.fqn in SHAPES
            like_source = original if kind == "dtensor" else source.detach()
            assert torch.equal(interval.within(like_source), interval.data)
            assert interval.shape == interval.held_shape == SHAPES[interval.fqn]
            interval.data.mul_(2)
    assert torch.equal(
        ranks.layouts[0].views(ranks.layouts[0].unpack(ranks.travelling))[0], 2 * ranks.originals[0]
    )


@pytest.mark.parametrize("kind", ["flat", "slices"])
def test_one_element_takes_no_more_than_itself(kind):
    ranks = Ranks(kind, 2, torch.float32, {"one": (1,)})
    assert [layout.shard_numel for layout in ranks.layouts] == [1, 1]
    assert [layout.intervals()[0].data.numel() for layout in ranks.layouts] == [1, 0]


def test_columns_are_no_intervals():
    layout = Ranks("dtensor", 2, dims=(1, 1, 1, 2, 0, 0)).layouts[0]
    for ask in (layout.intervals, layout.held_by_rank):
        with pytest.raises(ValueError, match="'matrix' is cut along dimension 1.*save it as the DTensor"):
            ask()


# what modules show


@each_kind
def test_what_modules_show(kind):
    ranks = Ranks(kind, 3)
    for layout, module, params in zip(ranks.layouts, ranks.modules, ranks.params):
        assert [*module._parameters] == [*SHAPES, *([FLAT] if kind == "flat" else [])]
        pieces = layout.pieces(layout.flat_param.data)
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
            assert type(module._parameters[FLAT]) is FlatParameter is type(layout.flat_param)
            assert layout.flat_param._fqns == tuple(SHAPES)
            assert layout.flat_param._shapes == (*SHAPES.values(),)
            with pytest.raises(ValueError, match="FlatParameter of 'matrix' and others would never be"):
                layout.flat_param.register_hook(print)
        assert layout.display.is_untouched()
        leaves = layout.make_leaves(layout.unpack(ranks.travelling))
        layout.display.leaves.show()
        for name, value, leaf, original in zip(SHAPES, shown(module), leaves, ranks.originals):
            assert value is leaf and type(value) is nn.Parameter and torch.equal(value, original)
            assert value.told == f"of {name}" and not value.requires_grad
        assert module.below.again is leaves[0] and not layout.display.is_untouched()
        layout.display.show_sharded()
        layout.display.cover()
        assert module.below.again is leaves[0] and layout.display.is_untouched()
        layout.display.uncover()
        assert module.below.again is not leaves[0]
        other = nn.Module()
        other.register_parameter("lent", None)
        layout.add_place(5, (other, "lent"))
        assert other.lent is module.vector
        layout.display.leaves.show()
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
        sum((each for each in of_all if each is not None), torch.zeros(original.shape)).reshape(-1)
        for original, of_all in zip(ranks.originals, zip(*drawn))
    ]
    for times in (1, 2):
        ranks.reduce(drawn)
        for name, found, expected in zip(SHAPES, ranks.gradients(), sums):
            assert (
                found is None if name == "cube" and kind != "flat" else torch.equal(found, times * expected)
            )
    for rank, layout in enumerate(ranks.layouts):
        present = [source.grad is not None for source in layout.sources]
        filled = [held[rank] > 0 for held in layout.held_by_rank()]
        if kind == "flat":
            assert present == [True] * 6
        elif kind == "dtensor":
            assert present == [True, True, True, False, True, True], "also of what this rank has no rows of"
            assert all(
                source.grad.placements == (Shard(0),) for source in layout.sources if source.grad is not None
            )
        else:
            used = [True, True, True, False, True, True]
            assert present == [*map(operator.and_, used, [*filled[:2], True, *filled[3:]])]
        written = torch.full((layout.shard_numel,), 9.0, dtype=layout.dtype)
        layout.write_gradient(written)
        held = [grad for grad in layout.gradients() if grad is not None]
        assert sum(grad.square().sum() for grad in held) == written.square().sum()
        if kind != "dtensor":
            joint = layout.joint_gradient()
            assert torch.equal(joint, written) if any(map(operator.and_, present, filled)) else joint is None
            assert layout.flat_param.grad is joint or torch.equal(layout.flat_param.grad, written)


def _memories(layout):
    """The sum of all gradients, and the number of memories that they lie in."""
    held = [grad for grad in layout.gradients() if grad is not None and grad.numel()]
    return {sum(grad.sum().item() for grad in held): len({each.untyped_storage()._cdata for each in held})}


@each_kind
def test_gradients_of_one_reduction_lie_in_one_memory(kind):
    ranks = Ranks(kind, 2)
    ranks.reduce([[torch.ones(shape) for shape in SHAPES.values()]] * 2)
    for layout in ranks.layouts:
        total = 2 * sum(map(torch.numel, layout.pieces(layout.flat_param.data)))
        assert _memories(layout) == {total: 1}
        filled = [param for param in layout.sharded_params if to_local(param).numel()]
        filled[-1].grad = filled[-1].grad.clone()
        if kind == "slices":
            assert _memories(layout) == {total: 2}
            assert layout.joint_gradient().sum() == total
            assert _memories(layout) == {total: 1}, "they are put together"


@each_kind
def test_who_used_what_is_known_where_it_must_be(kind):
    """Nobody asks for what is frozen unless it was used before; notes may be made of what lost them."""
    for frozen in (False, True):
        ranks = Ranks(kind, 2)
        for source in (source for layout in ranks.layouts for source in layout.sources):
            source.requires_grad_(kind == "flat")
        ranks.reduce(numbers(2), frozen)
        told = [layout.gradients()[1] is not None for layout in ranks.layouts]
        held = [held > 0 for held in ranks.layouts[0].held_by_rank()[1]]
        if frozen or kind == "flat":
            assert told == (held if kind == "slices" else [True, True])
        else:
            assert not told[0]
    for layout in ranks.layouts:
        shard = torch.zeros(layout.shard_numel, dtype=layout.dtype)
        wanted = [True, False, True, True, False, True]
        layout.note_in_shard(shard, wanted)
        found = layout.used_by_any(shard, [False] * 6, frozen=True)
        pieces = [piece.numel() > 0 for piece in layout.pieces(shard)]
        if kind == "flat":
            assert any(found)
        else:
            assert [*found] == (wanted if kind == "dtensor" else [*map(operator.and_, wanted, pieces)])


@each_kind
def test_gradients_are_replaced_where_they_change(kind):
    ranks = Ranks(kind, 2)
    ranks.reduce(numbers(2))
    for layout in ranks.layouts:
        own = torch.zeros(layout.shard_numel, dtype=layout.dtype)
        layout.write_gradient(own)
        before = [source.grad for source in layout.sharded_params]
        versions = [grad if grad is None else to_local(grad)._version for grad in before]
        present = [grad is not None for grad in layout.gradients()]
        layout.read_gradient(own, present)
        assert [source.grad for source in layout.sharded_params] == before or kind == "dtensor"
        for source, grad, version in zip(layout.sharded_params, before, versions):
            assert source.grad is grad and (grad is None or to_local(grad)._version == version)
        layout.read_gradient(2 * own, present)
        written = torch.zeros_like(own)
        layout.write_gradient(written)
        assert torch.equal(written, 2 * own)
        layout.read_gradient(own, [True, *[False] * 5])
        assert layout.sharded_params[0].grad is not None or (kind == "slices" and not layout._filled[0])
        assert all(source.grad is None for source in layout.sharded_params[1:])
        layout.read_gradient(None, [True] * 6)
        assert all(source.grad is None for source in layout.sharded_params)


@each_kind
def test_zeroing_is_told_from_nothing(kind):
    layout = Ranks(kind, 2).layouts[0]
    first, *others = layout.sharded_params
    first.requires_grad_(True)
    layout.mark_unsynced()
    assert not any(layout.zeroed()) and first.grad is not None, "a mark, by which zeroing is seen"
    for write in (lambda grad: grad.mul_(0.5), lambda grad: grad.add_(1)):  # scaled zeros stay negative
        write(to_local(first.grad))
        with pytest.warns(UserWarning, match=r"^the gradient of '.+' was scaled or written to"):
            assert not any(layout.zeroed()), "it was written to, and not zeroed"
    first.grad.zero_()
    assert layout.zeroed() == ([True] * 6 if kind == "flat" else [True, *[False] * 5])
    for source in others:
        source.grad = None
    assert layout.zeroed()[:2] == [True, True]
    layout.add_reduced(torch.zeros(layout.shard_numel, dtype=layout.dtype), [False] * 6)
    assert all(source.grad is None for source in others)
    layout.mark_unsynced()
    for source in layout.sources:
        source.grad = None
    assert all(layout.zeroed())
    layout.add_reduced(torch.zeros(layout.shard_numel, dtype=layout.dtype), [False] * 6)
    assert all(source.grad is None for source in layout.sources), "what no rank has used has no gradient"
    layout.mark_partial()
    marked = [source.grad is not None for source in layout.sources]
    assert marked == ([True] * 6 if kind == "flat" else [extent.fqn == "empty" for extent in layout.extents])
    assert not layout.zeroed_partial()
    layout.sources[2].grad = None
    assert layout.zeroed_partial()


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
    layout = Ranks("dtensor", 2).layouts[0]
    first, second, *_ = layout.sources
    first.grad = torch.full_like(first, 3.0)
    layout.take_gradients_in(torch.float32)
    assert second.grad is None and {param.grad_dtype for param in layout.sources} == {torch.float32}
    assert first.grad.dtype == torch.float32 and (to_local(first.grad) == 3).all()


def test_data_that_do_not_fit_are_refused():
    flat, (layout, _) = (Ranks(kind, 2).layouts for kind in ("flat", "slices"))
    flat[0].flat_param.data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"FlatParameter of 'matrix' and others .*\(3,\); they must keep"):
        flat[0].follow_replaced()
    kept = layout.sources[0].data
    for data, name in ((torch.zeros(2, dtype=torch.float64), "matrix"), (kept.float(), "narrow")):
        layout.sources[0].data = data
        with pytest.raises(ValueError, match=f"parameter '{name}'.*must keep.*the dtype of 'matrix'"):
            layout.follow_replaced()
    layout.sources[0].data = kept.clone().mul_(2)
    assert layout.follow_replaced() and torch.equal(layout.intervals()[0].data, kept * 2)


def test_a_dtensor_that_is_put_in_the_place_of_another_is_followed():
    ranks = Ranks("dtensor", 2)
    layout, module = ranks.layouts[0], ranks.modules[0]
    source = layout.sources[0]
    plain, low = nn.Parameter(torch.zeros(7, 5).double()), nn.Parameter(source.detach().float())
    for other, said in (
        (plain, "'matrix' was replaced by a Parameter"),
        (low, "'narrow' .*of one dtype with"),
    ):
        module._parameters["matrix"] = other
        with pytest.raises(ValueError, match=said):
            layout.follow_replaced()
    module._parameters["matrix"] = taken = nn.Parameter(source.detach() * 2)
    assert layout.follow_replaced() and layout.sources[0] is taken is module.below.again
    assert torch.equal(layout.intervals()[0].data, ranks.originals[0].detach()[:4].reshape(-1) * 2)
    module._parameters["matrix"] = None
    assert not layout.follow_replaced(), "what was removed is refused elsewhere"


def test_full_memory_is_free_before_that_of_gradients_is_made():
    buffers: list[Any] = []
    held: list[int] = []
    make, gradients = segment.Segment._make_buffers, segment.Gradients

    def noted(self: Any) -> Any:
        buffers[:] = make(self)
        return buffers

    def looking(*args: Any) -> Any:
        held.append(sum(each.tensor.untyped_storage().nbytes() for each in buffers))
        return gradients(*args)

    with fake_ranks(0, 2), mock.patch.object(segment.Segment, "_make_buffers", noted):
        with mock.patch.object(segment, "Gradients", looking):
            for size in (8, 9):  # cut evenly, and not: then what travels has memory of its own
                fully_shard(nn.Linear(3, size))
    assert held == [0, 0] and buffers[0] is not buffers[1]
