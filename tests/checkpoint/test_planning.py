"""Plans of saves: what ranks find out for themselves is what torch's planner finds on one rank."""

import math
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard, iter_full_params
from fsdp_wrap._params import IntervalTensor, Spread
from fsdp_wrap._params.parallel import HeldBy
from fsdp_wrap.checkpoint import export_safetensors, import_safetensors
from fsdp_wrap.checkpoint._planning.agreement import variants_of
from fsdp_wrap.checkpoint._planning.divisions import ByRows
from fsdp_wrap.checkpoint._planning.holding import Holding, described
from fsdp_wrap.checkpoint._planning.plan import SavingPlan
from fsdp_wrap.checkpoint._storage import CheckedWriter
from fsdp_wrap.checkpoint._team import Team
from params.fake_ranks import fake_ranks
from resuming import told_alike

State = Callable[[int, int], dict[str, Any]]
"""Makes a rank's state, from the rank and the number of ranks."""


@dataclass
class Planned:
    """One state, planned by us and by torch, on ranks that do not exist."""

    local: list[SavePlan]
    holdings: list[Holding]

    @classmethod
    def of(cls, make: State, size: int) -> "Planned":
        planned = cls([], [])
        for rank in range(size):
            with fake_ranks(rank, size):
                planner = DefaultSavePlanner()
                planner.set_up_planner(make(rank, size))
                planned.local.append(planner.create_local_plan())
                planned.holdings.append(
                    described(planner.state_dict, planner.mappings, planned.local[-1].items, rank)
                )
        return planned

    def ours(self) -> SavingPlan:
        sums = [holding.sums() for holding in self.holdings]
        pairs = [*zip(sums, self.holdings)]
        common = {of_rank.common: holding.common for of_rank, holding in pairs}
        begun = {of_rank.begun: holding.begun for of_rank, holding in pairs}
        groups = {of_rank.groups: holding.groups for of_rank, holding in pairs}
        own = [of_rank.own for of_rank in sums]
        return SavingPlan(variants_of(sums, common, begun, groups), own, range(len(sums)))

    def items(self) -> list[list[WriteItem]]:
        plan = self.ours()
        return [plan.items_of(rank, holding) for rank, holding in enumerate(self.holdings)]

    def torchs(self) -> tuple[list[SavePlan], Metadata]:
        planner = DefaultSavePlanner()
        planner.set_up_planner({})
        return planner.create_global_plan(self.local)


def nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def boxes(items: list[WriteItem]) -> Counter:
    """Boxes that are written, but for those without elements of a tensor that has some."""
    return Counter(
        (item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes)) if data else item.index.fqn
        for item in items
        for data in [item.tensor_data]
        if data is None or data.chunk.sizes.numel() or not data.size.numel()
    )


def entries_of(metadata: Metadata) -> dict[str, Any]:
    """Entries, in a form in which the order of chunks does not count."""
    return {
        fqn: (
            entry.size,
            entry.properties,
            sorted(
                (chunk.offsets, chunk.sizes)
                for chunk in entry.chunks
                if math.prod(chunk.sizes) or not math.prod(entry.size)
            ),
        )
        if isinstance(entry, TensorStorageMetadata)
        else "pickled"
        for fqn, entry in metadata.state_dict_metadata.items()
    }


SHAPES = [(10, 3), (3,), (2, 2), (16, 4), (16, 4), (8, 8, 2), (0, 5), (1, 1), ()]


def dtensors(mesh_shape: tuple[int, ...], placements: list[Any]) -> State:
    """A model and the state of its optimizer, of `DTensor`s of one mesh."""

    def make(rank: int, size: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = [Replicate()] * len(mesh_shape)
        dims = [placement.dim for placement in placements if not placement.is_replicate()]
        strided = any(type(placement) is _StridedShard for placement in placements)

        def cut(shape: tuple[int, ...]) -> DTensor:
            fits = len(shape) > max(dims, default=-1) and not (strided and (shape[0] % 4 or not shape[0]))
            where = placements if fits else whole
            full = torch.zeros(shape)
            return distribute_tensor(full, mesh, where, src_data_rank=None)

        model: dict[str, Any] = {f"w{number}": cut(shape) for number, shape in enumerate(SHAPES)}
        state = {
            f"w{number}": {"exp_avg": cut(shape), "step": torch.tensor(1.0)}
            for number, shape in enumerate(SHAPES)
        }
        model["buffer"] = torch.zeros(7, dtype=torch.float64)
        model["note"] = "pickled"
        optim = {"state": state, "param_groups": [{"params": list(state), "lr": 0.1}]}
        own = {str(rank): {"epoch": b"1"}}
        return {"model": model, "optim": optim, "extra": own, "random": {str(rank): b"2"}}

    return make


def intervals(copies: int, lacking: int | None = None, scales: bool = False) -> State:
    """Pieces of flat parameters, in copies of which none knows the ranks of another.

    `scales` are cut like them, and do not know which ranks have the others.
    """

    kept: list[Any] = []

    def make(rank: int, size: int) -> dict[str, Any]:
        count = size // copies
        kept.extend(dist.new_group([*range(first, first + count)]) for first in range(0, size, count))
        place, members = rank % count, tuple(range(rank // count * count, (rank // count + 1) * count))
        first, model, optim = 0, {}, {}
        length = -(-sum(math.prod(shape) for shape in SHAPES) // count)
        for number, shape in enumerate(SHAPES):
            spread = Spread(HeldBy(members, "cpu"), first, length)
            start, stop = [*spread.bounds(math.prod(shape))][place]
            piece = torch.zeros(stop - start)
            whole = torch.Size(shape)
            model[f"w{number}"] = IntervalTensor(whole, start, piece, spread=spread)
            if start < stop and rank != lacking:  # other ranks have no state of it
                average = IntervalTensor(whole, start, piece.double(), spread=spread)
                optim[f"w{number}"] = {"exp_avg": average, "step": torch.tensor(1.0), "mode": "cosine"}
                optim[f"w{number}"] |= {"scale": IntervalTensor(whole, start, piece)} if scales else {}
            first += math.prod(shape)
        return {"model": model, "optim": {"state": optim, "param_groups": [{"lr": 0.1}]}}

    return make


def pipeline(rank: int, size: int) -> dict[str, Any]:
    """Two stages, each sharded over its own half of the ranks; one tensor is on all."""
    half = size // 2
    stage = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "shard"))["shard"]
    number = rank // half
    rows = distribute_tensor(torch.zeros(5, 2), stage, [Shard(0)], src_data_rank=None)
    return {"model": {f"stage{number}.w": rows, "shared": torch.zeros(3)}, "random": {str(rank): b"2"}}


CASES: dict[str, tuple[State, int]] = {
    "rows": (dtensors((4,), [Shard(0)]), 4),
    "more ranks than rows": (dtensors((6,), [Shard(0)]), 6),
    "columns": (dtensors((3,), [Shard(1)]), 3),
    "hybrid": (dtensors((2, 3), [Replicate(), Shard(0)]), 6),
    "replicas": (dtensors((4,), [Replicate()]), 4),
    "tensor parallel": (dtensors((2, 2), [Shard(0), Shard(1)]), 4),
    "rows of rows": (dtensors((2, 3), [Shard(0), Shard(0)]), 6),
    "strided": (dtensors((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]), 4),
    "hybrid and strided": (dtensors((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]), 8),
    "intervals": (intervals(1), 5),
    "hybrid intervals": (intervals(2), 6),
    "intervals with scales": (intervals(1, scales=True), 5),
    "pipeline": (pipeline, 4),
    "one rank": (dtensors((1,), [Shard(0)]), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_each_box_is_written_once_and_the_metadata_are_torchs(case):
    planned = Planned.of(*CASES[case])
    theirs, metadata = planned.torchs()
    ours = planned.items()
    written = [item for of_rank in ours for item in of_rank]
    assert boxes(written) == boxes([item for plan in theirs for item in plan.items])
    assert max(boxes(written).values()) == 1
    for rank, items in enumerate(ours):  # nothing that this rank does not hold
        assert not boxes(items) - boxes(planned.local[rank].items)
    own = planned.ours().metadata()
    assert entries_of(own) == entries_of(metadata)
    assert own.planner_data == metadata.planner_data
    keys = [key for key, path in own.planner_data.items() if path[0] == "model"]
    first = planned.local[0].planner_data
    assert [key for key in keys if key in first] == [key for key in first if key in keys]


@pytest.mark.parametrize("case", ["hybrid", "replicas", "hybrid intervals", "hybrid and strided"])
def test_replicas_write_equal_parts(case):
    planned = Planned.of(*CASES[case])
    largest = max(nbytes(item) for plan in planned.local for item in plan.items)
    ours = [sum(map(nbytes, items)) for items in planned.items()]
    theirs = [sum(map(nbytes, plan.items)) for plan in planned.torchs()[0]]
    assert sum(ours) == sum(theirs)
    assert max(ours) <= sum(ours) / len(ours) + largest
    assert max(ours) <= max(theirs) + largest


def test_all_ranks_tell_a_few_bytes_and_make_only_their_own_boxes():
    planned = Planned.of(dtensors((8,), [Shard(0)]), 8)
    told = [len(pickle.dumps(holding.sums())) for holding in planned.holdings]
    assert max(told) < 400 < len(pickle.dumps(planned.local[0]))
    assert len({holding.sums()[:3] for holding in planned.holdings}) == 1

    divided = Planned.of(lambda rank, size: {"model": {"w": rows_of(9)}}, 4)
    refused = mock.patch.object(ByRows, "boxes", side_effect=AssertionError("made boxes of all ranks"))
    with refused:
        assert [len(items) for items in divided.items()] == [1, 1, 1, 0]


def test_one_rank_tells_of_optimizer_state_that_only_some_ranks_have():
    planned = Planned.of(intervals(2), 8)
    told = [entry.fqn for holding in planned.holdings[:4] for entry in holding.begun.entries]
    held = {fqn for plan in planned.local[:4] for fqn in plan.planner_data if fqn.startswith("optim.state")}
    assert sorted(told) == sorted(held)
    sums = [holding.sums() for holding in planned.holdings]
    assert len({of_rank.common for of_rank in sums}) == 1
    assert [of_rank.begun for of_rank in sums[:4]] == [of_rank.begun for of_rank in sums[4:]]


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)], src_data_rank=None)


def test_tensors_that_are_cut_alike_share_their_boxes():
    state = lambda rank, size: {"model": {name: rows_of(8, 2) for name in "abc"} | {"d": rows_of(4, 2)}}  # noqa: E731
    entries = Planned.of(state, 4).ours().metadata().state_dict_metadata
    assert entries["model.a"].chunks is entries["model.b"].chunks is entries["model.c"].chunks
    assert len(entries["model.d"].chunks) == 4 and entries["model.d"].chunks is not entries["model.a"].chunks


def _differing(of_rank_1: Callable[[], Any]) -> State:
    return lambda rank, size: {"model": {"w": of_rank_1() if rank == 1 else rows_of(8), "v": torch.ones(2)}}


MISMATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (
        lambda: rows_of(6),
        r"'model.w' is torch.float32 of shape \(8,\) on rank 0 and torch.float32 of shape \(6,\) on rank 1",
    ),
    "dtype": (
        lambda: rows_of(8, dtype=torch.float64),
        r"'model.w' is torch.float32 of shape \(8,\) on rank 0 and torch.float64 of shape \(8,\) on rank 1",
    ),
    "a number": (lambda: 3, r"'model.w' is torch.float32 of shape \(8,\) on rank 0 and pickled on rank 1"),
    "not sharded": (
        lambda: torch.zeros(8),
        r"'model.w', of shape \(8,\), is cut in ways that .* twice, as rank 0, rank 1 have it",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_what_differs_between_ranks_is_refused_by_name_and_rank(kind):
    make, message = MISMATCHES[kind]
    with pytest.raises(ValueError, match=message):
        Planned.of(_differing(make), 4).ours()


def test_a_rank_that_lacks_a_part_is_named():
    def make(rank: int, size: int) -> dict[str, Any]:
        return {"model": {"v": torch.ones(2)} | ({} if rank in (1, 3) else {"w": rows_of(8)})}

    with pytest.raises(ValueError, match="rank 0 says that 'model.w' is sharded over ranks 1, 3"):
        Planned.of(make, 4).ours()
    planned = Planned.of(lambda rank, size: {"model": {"w": rows_of(8)}}, 4)
    planned.holdings[2].items.clear()  # what it holds is not what it says
    with pytest.raises(RuntimeError, match="rank 2 does not hold the part of 'model.w'"):
        planned.items()


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        (0, "'optim.state.w3.exp_avg' is torch.float64 of shape .* on rank 1 and nothing elsewhere"),
        (1, "rank 1 does not hold the part of 'optim.state.w.*'"),
    ],
)
def test_a_rank_without_its_optimizer_state_is_named(lacking, message):
    """Also where a rank that has nothing of a parameter rightly has no state of it."""
    with pytest.raises(RuntimeError, match=message):
        Planned.of(intervals(1, lacking), 4).items()


class WithBuffer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(shape))


@ranks(4)
def test_torch_reads_what_stages_write_that_tell_each_other(rank, world_size, tmp_path):
    half = world_size // 2
    stages = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "shard"))
    full = {name: torch.arange(10.0).view(5, 2) + number for number, name in enumerate(("a", "b"))}
    shared: dict[str, Any] = {"table": torch.arange(3), "note": [1, "two"]}
    own = "ab"[rank // half]
    rows = distribute_tensor(full[own], stages["shard"], [Shard(0)], src_data_rank=None)
    copies = distribute_tensor(full["a"], stages, [Replicate(), Shard(0)], src_data_rank=None)
    state = {"model": {own: rows, "copies": copies, **shared}, "random": {str(rank): b"own"}}
    writer = CheckedWriter(tmp_path, 1, world_size, False)
    writer.save(state, Team.of(None, "checkpoint.save"))
    dist.barrier()
    target: dict[str, dict[str, Any]] = {"model": {name: torch.zeros(5, 2) for name in ("a", "b", "copies")}}
    target["model"] |= {"table": torch.zeros(3, dtype=torch.int64), "note": None}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    read = target["model"]
    assert torch.equal(read["a"], full["a"]) and torch.equal(read["b"], full["b"])
    assert torch.equal(read["copies"], full["a"]) and torch.equal(read["table"], shared["table"])
    assert read["note"] == shared["note"]


@pytest.mark.parametrize("front", ["fully_shard", "flat"])
@ranks(2)
def test_a_default_device_does_not_count(rank, world_size, tmp_path, front):
    plain = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    model: nn.Module = FSDP(plain, sync_module_states=True) if front == "flat" else fully_shard(plain)
    with torch.device("meta"):
        checkpoint.save(tmp_path, model, step=1)
        export_safetensors(model, tmp_path / "weights")
    for param in model.parameters():
        param.data.zero_()
    checkpoint.load(tmp_path, model)
    again = dict(iter_full_params(model))
    for param in model.parameters():
        param.data.zero_()
    with torch.device("meta"):
        import_safetensors(model, tmp_path / "weights", budget=16)
    for values in (again, dict(iter_full_params(model))):
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[name], value) for name, value in wanted.items())


@ranks(3)
def test_a_save_of_differing_states_fails_on_all_ranks_and_leaves_nothing(rank, world_size, tmp_path):
    checkpoint.save(tmp_path, WithBuffer(4), step=1)
    with pytest.raises(RuntimeError, match="saving step 2 in .* failed") as error:
        checkpoint.save(tmp_path, WithBuffer(4 + rank // 2), step=2)
    alike = "is torch.float32 of shape (4,) on rank 0 and torch.float32 of shape (5,) on rank 2"
    assert f"'model.table' {alike}" in told_alike(error)
    assert checkpoint.latest(tmp_path).name == "step_00000001"
    assert [path.name for path in tmp_path.iterdir() if "00000002" in path.name] == []
