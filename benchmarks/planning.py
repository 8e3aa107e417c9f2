"""Processor time and memory of planning the save of a checkpoint, by the number of ranks.

python -m benchmarks.planning --cases "256 ranks: rows" --impl dcp,fsdp_wrap --rounds 3
"""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_fake
from fsdp_wrap._params import IntervalTensor, Spread
from fsdp_wrap._params.parallel import HeldBy
from fsdp_wrap.checkpoint._manifest import Box
from fsdp_wrap.checkpoint._planning.agreement import Agreed
from fsdp_wrap.checkpoint._planning.holding import Holding, described
from fsdp_wrap.checkpoint._planning.plan import Variant

PARAMETERS = 2000
OF_A_LAYER = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096,), (14336, 4096)] + [
    (14336, 4096),
    (4096, 14336),
]
"""Shapes of the parameters of a layer, as in Llama 3 8B."""

TINY, FEW, MANY = 8, 256, 1024
ROWS, INTERVALS, DISTINCT = "rows", "intervals", "rows of different shapes"
USUAL = {
    f"{ranks} ranks: {kind}": (ranks, kind) for ranks in (FEW, MANY) for kind in (ROWS, INTERVALS, DISTINCT)
}
CASES = {**USUAL, f"{TINY} ranks: {ROWS}": (TINY, ROWS)}
OURS, OTHER, THEIRS = "fsdp_wrap", "fsdp_wrap on another rank", "dcp"
ROUNDS = 3


def _shapes(kind: str) -> list[tuple[int, ...]]:
    shapes = [OF_A_LAYER[number % len(OF_A_LAYER)] for number in range(PARAMETERS)]
    if kind == DISTINCT:
        return [(rows, *columns, 1 + number) for number, (rows, *columns) in enumerate(shapes)]
    return shapes


def _state(ranks: int, kind: str, rank: int = 0) -> dict[str, Any]:
    """Returns a rank's state, of tensors without memory; no group is asked."""
    tensors: dict[str, torch.Tensor] = {}
    mesh = init_device_mesh("cpu", (ranks,))
    held_by = HeldBy(tuple(range(ranks)), "cpu")
    shapes = _shapes(kind)
    length = -(-sum(torch.Size(shape).numel() for shape in OF_A_LAYER) // ranks)
    first = 0
    for number, shape in enumerate(shapes):
        full = torch.empty(shape, device="meta")
        if kind == INTERVALS:
            first *= number % len(OF_A_LAYER) > 0  # each layer has a buffer of its own
            spread = Spread(held_by, first, length)
            start, stop = [*spread.bounds(full.numel())][rank]
            piece = torch.empty(stop - start, device="meta")
            tensors[f"layers.{number}"] = IntervalTensor(full.shape, start, piece, spread=spread)
            first += full.numel()
        else:
            rows = -(-shape[0] // ranks)
            local = torch.empty(max(0, min(rows, shape[0] - rank * rows)), *shape[1:], device="meta")
            how: dict[str, Any] = {"run_check": False, "shape": full.shape, "stride": full.stride()}
            tensors[f"layers.{number}"] = DTensor.from_local(local, mesh, [Shard(0)], **how)
    return {"model": tensors}


class Planning:
    """The state of the first rank, and what other ranks send it."""

    def __init__(self, ranks: int, kind: str) -> None:
        self.ranks, self.state = ranks, _state(ranks, kind)

    def _local(self) -> tuple[DefaultSavePlanner, SavePlan]:
        planner = DefaultSavePlanner()
        planner.set_up_planner(self.state, is_coordinator=True)
        return planner, planner.create_local_plan()

    def _holding(self) -> tuple[DefaultSavePlanner, Holding]:
        planner, plan = self._local()
        return planner, described(planner.state_dict, planner.mappings, plan.items, 0)


class Theirs(Planning):
    """DCP: the first rank makes one plan of all plans. A save of fsdp_wrap did this, too."""

    def __init__(self, ranks: int, kind: str) -> None:
        super().__init__(ranks, kind)
        holding = self._holding()[1]
        boxes = [part.cut.boxes() for part in holding.common.parts]
        self._sent = [self._sent_by(rank, holding, boxes) for rank in range(ranks)]
        self.bytes_to_first = sum(map(len, self._sent))

    def _sent_by(self, rank: int, holding: Holding, boxes: list[list[list[Box]]]) -> bytes:
        items = [
            WriteItem(
                MetadataIndex(entry.fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    TensorProperties(torch.float32),
                    torch.Size(holding.common.parts[entry.part].cut.shape),
                ),
            )
            for entry in holding.common.entries
            for offsets, sizes in boxes[entry.part][rank]
        ]
        paths = {entry.fqn: entry.path for entry in holding.common.entries}
        return pickle.dumps(SavePlan(items, planner_data=paths))

    def run(self) -> None:
        """Makes a plan, reads those of others, makes one of them, and sends each its own."""
        planner, plan = self._local()
        pickle.dumps(plan)
        plans, _ = planner.create_global_plan([pickle.loads(plan) for plan in self._sent])
        for plan in planner.global_plan:
            pickle.dumps(plan)


class Ours(Planning):
    """`fsdp_wrap.checkpoint`: each rank makes its plan, the first one the metadata as well."""

    makes_metadata = True

    def __init__(self, ranks: int, kind: str) -> None:
        super().__init__(ranks, kind)
        self._sent = [pickle.dumps(self._holding()[1].sums())] * ranks
        self.bytes_to_first = sum(map(len, self._sent))

    def run(self) -> None:
        """Describes what is here, reads what other ranks tell, and plans."""
        planner, holding = self._holding()
        pickle.dumps(holding.sums())
        sums = [pickle.loads(told) for told in self._sent]
        everyone = range(self.ranks)
        common = Variant(holding.common.entries, holding.common.parts, [holding.groups], everyone)
        agreed = Agreed(planner, 0, everyone, sums, holding, [common])
        agreed.own_plan()
        if self.makes_metadata:
            agreed.metadata()


class OfOthers(Ours):
    """The same on a rank that makes no metadata."""

    makes_metadata = False


COMPETITORS: dict[str, Callable[[int, str], Any]] = {THEIRS: Theirs, OURS: Ours, OTHER: OfOthers}


def measure(ranks: int, kind: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns processor seconds of each round; called on a fake group."""
    turns = {name: COMPETITORS[name](ranks, kind).run for name in names}
    return interleave(turns, rounds, warmup=0, clock=time.process_time)


def weigh(ranks: int, kind: str, name: str) -> dict[str, float]:
    """Returns by how many megabytes planning raises the peak of memory, and what the first rank is sent."""
    competitor = COMPETITORS[name](ranks, kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    competitor.run()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"peak MB": grown, "sent to the first rank MB": competitor.bytes_to_first / 1e6}


def ask(settings: Settings) -> Figures:
    """Returns a table for each number of ranks and kind of sharding."""
    figures: Figures = {}
    names = settings.implementations([*COMPETITORS])
    for case in settings.cases_of([*CASES], [*USUAL]):
        ranks, kind = CASES[case]
        times = run_fake(measure, ranks, ranks, kind, names, settings.rounds or ROUNDS)
        figures[case] = compare(times, {THEIRS: (THEIRS,)}, ("s", 1.0))
        for name in names:
            figures[case][name].update(run_fake(weigh, ranks, ranks, kind, name))
    return figures


QUESTION = Question(
    "planning",
    "Planning a save",
    f"""\
Processor seconds until it is known what every rank writes, in the first save of a model of {PARAMETERS:,}
parameters: on the first rank, which makes the metadata, too, and `on another rank`. `dcp` is torch's
`DefaultSavePlanner`, by which `fsdp_wrap.checkpoint` planned until now. Ranks are synthetic: the first one
is real, and what others send it was made before; the time that it travels is not included. `{ROWS}`: each
parameter is a `DTensor` of rows, as `fully_shard` makes it; `{INTERVALS}`: each layer is a flat parameter.
The shapes are those of Llama 3 8B; `{DISTINCT}`: no two parameters have the same. `peak MB`: by how much
memory rises at most, of which the metadata, with a box for each rank and parameter, stay. Medians of
{ROUNDS} rounds in turns, in one process of one thread. The tables of {MANY:,} ranks are without `dcp`, which
takes minutes a round there (`--impl` takes it).""",
    ask,
    chart="s",
    cases=[*CASES],
    implementations=[*COMPETITORS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
