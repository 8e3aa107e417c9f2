"""Records of values are the same for all ways to shard, and their diff names the first seam that departs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks, run_ranks
from composable import shard_blocks
from fronts import no_sync, shard, shard_columns
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, record_values, uneven
from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, everywhere
from fsdp_wrap._values import files
from fsdp_wrap._values.command import report
from fsdp_wrap._values.compare import Run
from fsdp_wrap._values.statistics import Statistics
from fsdp_wrap._values.verdict import Verdict, judge
from fsdp_wrap.tools.command import main
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block, Checkpointing, Net

UNITS = ["blocks.0", "blocks.1"]
ROWS = 8


class Dropping(Net):
    """A net with dropout before its head."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x if block is self.blocks[0] else nn.functional.dropout(x, 0.1, self.training))
        return self.head(x)


class CheckpointedNet(Checkpointing, Net):
    """A net whose blocks are computed again in the backward."""


def made(front: str = "orig", net: type[nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if front == "columns":
        module = net()
        return shard_columns(module, module.blocks)
    return shard(front, net(), ModuleWrapPolicy({Block}), **options)


def batches(step: int, count: int) -> list[torch.Tensor]:
    """Returns the micro-batches of all ranks: the rows of one batch."""
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return [*rows.chunk(count)]


def train(
    model: nn.Module,
    folder: Any,
    own: Callable[[int], list[torch.Tensor]],
    *,
    steps: int = 3,
    factor: float = 1.0,
    units: Any = (),
    every: int = 1,
    fault: PlugIn | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record_values(model, folder, every, units=units):
        if fault is not None:
            everywhere.attach(fault)
        for step in range(steps):
            *first, last = own(step)
            for x in first:
                with no_sync(model):
                    (model(x).square().mean() * factor / (1 + len(first))).backward()
            (model(last).square().mean() * factor / (1 + len(first))).backward()
            optimizer.step()
            optimizer.zero_grad()


def compared(one: Any, other: Any) -> Verdict:
    return judge(Run(files.read(one)), Run(files.read(other)))


def test_statistics_add_up_over_pieces():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.randn(20_001).to(dtype)
        whole = Statistics()
        whole.add(values, "name")
        for cuts in ([1, 5_000, 15_000], [4_095, 1, 15_905], [10, 20, 30, 19_941]):
            parts, start = Statistics(), 0
            for piece in values.split(cuts):
                parts.add(piece, "name", start)
                start += len(piece)
            assert (parts.checksum, parts.numel) == (whole.checksum, whole.numel)
            assert parts.norm == pytest.approx(whole.norm) and parts.sketch == pytest.approx(
                whole.sketch, 1e-3, 1e-2
            )
        others = [values.roll(1), values * 1.01, values.index_fill(0, torch.tensor(7), 0.0)]
        for other in others:
            statistics = Statistics()
            statistics.add(other, "name")
            assert statistics.checksum != whole.checksum
        named = Statistics()
        named.add(values, "other")
        assert named.checksum != whole.checksum
    rows, moved = Statistics(), Statistics()
    activation = torch.randn(6, 50)
    rows.add(activation)
    moved.add(activation[torch.tensor([3, 1, 5, 0, 2, 4])])
    assert rows.checksum == moved.checksum and rows.sketch == pytest.approx(moved.sketch, 1e-3, 1e-4)


def record_plain(folder: Any, **options: Any) -> None:
    torch.manual_seed(0)
    train(Net(), folder, lambda step: batches(step, 1), units=UNITS, **options)


def test_front_ends_and_a_plain_module_record_the_same(tmp_path):
    """Bit for bit at equal numbers of ranks; a plain module rounds otherwise."""
    record_plain(tmp_path / "plain")
    for front in ("flat", "composable", "columns"):
        run_ranks(2, _recording, str(tmp_path / front), {"front": front})
    run_ranks(2, _recording, str(tmp_path / "checkpointed"), {"front": "flat", "net": CheckpointedNet})
    for other in ("composable", "columns", "checkpointed"):
        assert compared(tmp_path / "flat", tmp_path / other).kind == "equal", other
    verdict = compared(tmp_path / "plain", tmp_path / "composable")
    assert verdict.kind == "rounding", (verdict.told, verdict.first)
    assert len({(step.seam, step.unit) for step in verdict.steps}) >= 20


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "kept": (2, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "offloaded": (2, {"cpu_offload": CPUOffload(offload_params=True)}),
    "micro-batches": (2, {"micro": 2}),
    "alone": (1, {"front": "composable"}),
    "four ranks": (4, {"front": "composable"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_shard_record_the_same(way, tmp_path):
    count, options = WAYS[way]
    record_plain(tmp_path / "plain")
    run_ranks(2, _recording, str(tmp_path / "two"), {"front": "orig"})
    run_ranks(count, _recording, str(tmp_path / way), {"front": "orig", **options})
    if way in ("kept", "offloaded"):
        assert compared(tmp_path / "two", tmp_path / way).kind == "equal"
    for other in ("two", "plain"):
        verdict = compared(tmp_path / other, tmp_path / way)
        assert verdict.kind in ("rounding", "equal"), (other, verdict.told, verdict.first)


def _recording(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    micro = options.pop("micro", 1)
    own = slice(rank * micro, (rank + 1) * micro)
    train(made(**options), folder, lambda step: batches(step, world_size * micro)[own])


def _without_a_batch(rank: int, world_size: int, folder: str) -> None:
    """Trains on the batches of all; in the second step one rank has all rows of it."""
    model = made("composable")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record_values(model, folder, every=1):
        for step in range(3):
            with uneven(model) if step == 1 else nullcontext():
                for x in batches(step, 1)[rank:] if step == 1 else [batches(step, world_size)[rank]]:
                    model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_steps_have_one_number_on_all_ranks_though_one_has_no_batch(tmp_path):
    record_plain(tmp_path / "plain")
    run_ranks(2, _without_a_batch, str(tmp_path / "two"))
    (plain,), two = files.read(tmp_path / "plain"), files.read(tmp_path / "two")
    assert [[*record.steps] for record in two] == [[*plain.steps]] * 2
    for number, step in plain.steps.items():
        for unit in ("", *UNITS):
            updated = [record.steps[number].rows[files.UPDATE, unit].total for record in two]
            assert sum(updated) == pytest.approx(step.rows[files.UPDATE, unit].total, rel=1e-4), (
                number,
                unit,
            )


class Fault(PlugIn):
    """Changes values at a seam of `blocks.1` in the second step, on the second rank."""

    def __init__(self, kind: str) -> None:
        self._kind, self._steps = kind, 0
        self.order = Precedence.VALUES if kind == "missing sum" else -1  # after the record has looked
        self._stale: list[torch.Tensor] = []

    def forward_opens(self, step: Any) -> None:
        self._steps += 1

    def sees(self, owner: Any, seam: ValueSeam, values: Any) -> None:
        now = self._steps == 2
        if seam is ValueSeam.REDUCED:
            if now and self._kind == "missing division" and "up.weight" in owner.layout.fqns:
                values[0].mul_(dist.get_world_size())
        elif owner.fqn == "blocks.1" and dist.get_rank() == 1:
            (segment,) = owner.buffers.segments
            if seam is ValueSeam.PARAMETERS and self._kind == "stale gather":
                for leaf, old in zip(segment.leaves, self._stale):
                    leaf.data.copy_(old)
                self._stale = [leaf.detach().clone() for leaf in segment.leaves]
            elif seam is ValueSeam.GRADIENTS and now and self._kind == "missing sum":
                for leaf in segment.leaves:
                    leaf.grad.zero_()


def _faulty(rank: int, world_size: int, folder: str, kind: str, front: str) -> None:
    def own(step: int) -> list[torch.Tensor]:
        torch.manual_seed(step + 100 * (kind == "dropout" and rank == step == 1))
        return [batches(step + (kind == "input" and step == 1), world_size)[rank]]

    fault = Fault(kind)
    try:
        train(made(front, Dropping), folder, own, factor=1.01 if kind == "loss" else 1.0, fault=fault)
    finally:
        everywhere.detach(fault)


VERDICTS = {
    "loss": ("scale", 0, "gradient of output", "", (0, 1), "1.01 times"),
    "input": ("other input", 1, "input", "", (0, 1), "another input"),
    "dropout": ("other computation", 1, "input", "blocks.1", (1,), "dropout"),
    "stale gather": ("stale", 1, "parameter", "blocks.1", (1,), "rank 1 has gathered stale values"),
    "missing sum": (
        "missing sum",
        1,
        "reduced gradient",
        "blocks.1",
        (0, 1),
        "gradient of rank 1 is missing",
    ),
    "missing division": ("scale", 1, "reduced gradient", "blocks.1", (0, 1), "by the 2 ranks is missing"),
}


@pytest.mark.parametrize("front", ["flat", pytest.param("composable", marks=pytest.mark.slow)])
def test_the_first_seam_that_departs_is_named(front, tmp_path):
    run_ranks(2, _faulty, str(tmp_path / "right"), "none", front)
    for kind, (verdict, step, seam, unit, culprits, told) in VERDICTS.items():
        run_ranks(2, _faulty, str(tmp_path / kind), kind, front)
        comparison = compared(tmp_path / "right", tmp_path / kind)
        first = comparison.first
        assert first is not None, kind
        said = kind, first.ranks, comparison.told
        assert (comparison.kind, first.step, first.seam, first.unit) == (verdict, step, seam, unit), said
        assert first.ranks == culprits and told in comparison.told, said


def test_the_command_draws_departure_against_depth(tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 1.5)):
        record_plain(tmp_path / name, factor=factor, every=2)
    assert Run(files.read(tmp_path / "a")).steps == [0, 2]
    folders = [str(tmp_path / name) for name in "ab"]
    assert main(["values", "diff", *folders, "--svg", str(tmp_path / "c.svg")]) == 0
    told = capsys.readouterr().out
    assert "relative departure" in (tmp_path / "c.svg").read_text()
    assert "first departure: step 0, gradient of output of unit (root), by 3.3e-01" in told
    assert "scale: The second has 1.5 times the first" in told
    assert "'blocks.1'  3.3e-01 |#" in told and "'blocks.1'  0.0e+00 | " in told
    record_plain(tmp_path / "zero", factor=0.0, every=2)
    assert "has 0 times the first" in compared(tmp_path / "a", tmp_path / "zero").told
    same, run = compared(tmp_path / "a", tmp_path / "a"), Run(files.read(tmp_path / "a"))
    assert same.kind == "equal" and report(same, [run, run])[-1].startswith("equal: ")


class Adding(nn.Module):
    """Layers that add to a list from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(2))
        for layer in self.layers:
            layer.forward = lambda x, added, of=layer: added.append(nn.functional.bilinear(x, x, of.weight))

    def forward(self, x):
        added = [x]
        for layer in self.layers:
            layer(added[-1], added)
        return torch.stack(added)


def test_a_plain_module_computes_while_recorded_as_it_does_else(tmp_path):
    net, x = Adding(), torch.ones(2, WIDTH, requires_grad=True)
    with record_values(net, tmp_path / "a", 1, units=["layers.0", "layers.1"]):
        recorded = net(x)
    assert torch.equal(recorded, net(x)) and len(recorded) == 3


def test_wrong_uses_are_refused(tmp_path):
    net = Net()
    with pytest.raises(ValueError, match="every=0 must be a positive number"):
        record_values(net, tmp_path / "a", 0)
    with pytest.raises(ValueError, match="no modules of Net"):
        record_values(net, tmp_path / "a", units=["blocks.7"])
    with record_values(net, tmp_path / "b"), pytest.raises(ValueError, match="needs a folder of its own"):
        record_values(net, tmp_path / "b")
    with pytest.raises(ValueError, match="no rank has written values"):
        files.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no step in common"):
        compared(tmp_path / "b", tmp_path / "b")


@pytest.mark.slow
@ranks(4)
def test_a_hybrid_mesh_and_bf16_are_compared(rank, world_size, tmp_path):
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    train(shard_blocks(net, mesh=mesh), f"{folder[0]}/hybrid", lambda step: [batches(step, 4)[rank]])
    mixed = made("orig", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    train(mixed, f"{folder[0]}/bf16", lambda step: [batches(step, 4)[rank]])
    dist.barrier()
    if rank == 0:
        verdict = compared(f"{folder[0]}/hybrid", f"{folder[0]}/bf16")
        assert verdict.kind == "rounding", (verdict.told, verdict.first)
