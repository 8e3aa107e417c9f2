"""`audit` finds flipped bits in drawn steps, names rank, unit and phase, and nothing in clean steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import apart
from bed import ranks
from fronts import FRONTS, chosen, inner, no_sync, shard, shard_columns, within_copy
from fsdp_wrap import (
    Audit,
    Corruption,
    CorruptionError,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    audit,
    reproducible,
)
from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, everywhere
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._values.auditing.corruption import causes
from fsdp_wrap._values.statistics import bit_sums, block_sums, changed_place
from fsdp_wrap.flat_param import FlatParameter
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects
from nets import WIDTH, Block, Checkpointing, Net

INTS = {2: torch.int16, 4: torch.int32}
flips: list[Callable[[torch.Tensor], torch.Tensor]] = []
"""What is to be done once to the activation of a block, or to its gradient."""


class Passing(torch.autograd.Function):
    """Passes a tensor and its gradient on, and flips a bit once."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.backward = backward
        return x.clone() if backward or not flips else flips.pop()(x)

    @staticmethod
    def backward(ctx, grad):
        return (flips.pop()(grad) if ctx.backward and flips else grad), None


class FaultyBlock(Block):
    backward: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(5)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        if self.backward is not None:
            hidden = Passing.apply(hidden, self.backward)
        return x + self.down(self.drop(self.norm(hidden)))


class FaultyNet(Net):
    block = FaultyBlock


class CheckpointedNet(Checkpointing, FaultyNet):
    pass


class ReentrantNet(CheckpointedNet):
    reentrant = True


def made(front: str, net: type[nn.Module] = FaultyNet, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(front, net(), ModuleWrapPolicy({FaultyBlock}), **options)


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH) + dist.get_rank()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# faults


def flip(tensor: torch.Tensor, draw: random.Random) -> float:
    """Flips a bit of an element; returns by how much that changes it, relative to the mean of all."""
    flat, size = tensor.data, tensor.element_size()  # no version counter tells of it
    ints, place = flat.view(INTS[size]), tuple(draw.randrange(length) for length in flat.shape)
    before, bit = flat[place].item(), draw.randrange(8 * size)
    mean = flat.abs().mean().item()
    ints[place] ^= (1 << bit) - (bit == 8 * size - 1) * (1 << bit + 1)
    change = abs(flat[place].item() - before) / mean if mean else math.inf
    return change if change > 0 else 1e-30  # NaN, and the sign of zero, too


def flipped(fault: Fault) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        fault.size = flip(tensor, fault.draw)
        return tensor

    return apply


def pieces_of(sharded: Any) -> list[torch.Tensor]:
    return [interval.data for interval in sharded.intervals() if interval.data.numel()]


class Fault(PlugIn):
    """Flips one bit at a seam of a unit, before others look, or after a reduce buffer was looked at."""

    def __init__(self, kind: str, unit: Any, draw: random.Random) -> None:
        self.kind, self.unit, self.draw, self.size = kind, unit, draw, 0.0
        self.order = Precedence.VALUES if kind.endswith("sent") else -1
        self._sharded = draw.choice([param for param in unit.params if pieces_of(param)] or [None])

    def sees(self, owner: Any, seam: ValueSeam, values: Any) -> None:
        if self.size or (owner is not self.unit and owner not in self.unit.params):
            return
        target, again = None, graph_task() != -1
        if seam is ValueSeam.PARAMETERS and self.kind == f"gather, {'back' if again else 'for'}ward":
            segment = self.draw.choice([*self.unit.segments])
            target = self.draw.choice(list(segment.leaves)).data
        elif seam is ValueSeam.OUTPUTS and self.kind == "output" and not again:
            target = values[0]
        elif seam is ValueSeam.OUTPUTS and self.kind == "shard, in the step" and self._sharded is not None:
            target = self.draw.choice(pieces_of(self._sharded))
        elif seam is ValueSeam.GRADIENTS and self.kind == "gradient":
            grads = [leaf.grad for segment in self.unit.segments for leaf in segment.leaves]
            target = self.draw.choice([grad for grad in grads if grad is not None])
        elif seam is ValueSeam.REDUCED and self.kind == "reduced shard":
            target = self.draw.choice(
                [piece for piece in owner.layout.pieces(values[0]) if piece.numel()] or [None]
            )
        if target is not None:
            self.size = flip(target, self.draw)

    def send(self, sharded: Any, full: torch.Tensor) -> None:
        if not self.size and sharded in self.unit.params and self.kind == "reduce buffer, sent":
            parts = [part for several in sharded.layout.parts(full) for part in several if part.numel()]
            self.size = flip(self.draw.choice(parts), self.draw)


KINDS = {
    "shard, between steps": "shard",
    "shard, in the step": "shard",
    "gather, forward": "gather",
    "gather, backward": "gather",
    "activation": "forward",
    "output": "forward",
    "activation's gradient": "backward",
    "gradient": "backward",
    "reduced shard": "reduction",
    "reduce buffer, sent": "reduction",
    "update": "update",
}
"""Kinds of faults, with the phase to be named."""


class Outcome(NamedTuple):
    """What became of a fault: the culprit and its unit, how large the change was, and what was found."""

    kind: str
    culprit: int
    unit: str
    size: float
    told: list[Corruption]

    @property
    def right(self) -> bool:
        """Whether rank, unit and phase of the first finding are right."""
        phases = {KINDS[self.kind], *["backward"] * (self.kind == "activation")}  # it may round to the same
        first = self.told[0] if self.told else None
        if first is None or (first.rank, first.unit) != (self.culprit, self.unit):
            return False
        return first.phase in phases


def faulty_step(kind: str, draw: random.Random, model: nn.Module, optimizer: Any, watch: Audit) -> Outcome:
    """Runs a step with one fault on one rank."""
    (tree,) = watch._trees
    culprit, number = draw.randrange(dist.get_world_size()), tree._number + tree._stepped
    blocks = [unit for name, unit in tree._units.items() if name.startswith("blocks")]
    unit = tree._random("unit", number).choice(blocks)  # the drawn one
    if KINDS[kind] in ("shard", "gather", "reduction"):
        unit = draw.choice([*tree._units.values()])
    here, draw = dist.get_rank() == culprit, random.Random(draw.random())
    fault = Fault(kind if here else "", unit, draw)
    if kind == "shard, between steps":  # of the audited step and the next one
        step(model, optimizer)
        if here and fault._sharded is not None:
            fault.size = flip(draw.choice(pieces_of(fault._sharded)), draw)
    elif kind.startswith("activation"):
        block = inner(unit.module)
        block.backward = kind != "activation"
        flips[:] = [flipped(fault)] if here else []
        step(model, optimizer)
        del block.backward
        flips.clear()
    elif kind == "update":
        spoiled_update[:] = [(watch, fault)] if here else []
        step(model, optimizer)
        unit = fault.unit
    else:
        with everywhere.having(fault):
            step(model, optimizer)
    named = next(name for name, unit in tree._units.items() if unit is fault.unit)
    told = gather_objects((named, fault.size))
    name, size = told[culprit]
    return Outcome(kind, culprit, name, size, watch.findings)


spoiled_update: list[tuple[Audit, Fault]] = []


def spoil_update(optimizer: Any, args: Any, kwargs: Any) -> None:
    if spoiled_update:
        watch, fault = spoiled_update.pop()
        before = watch._trees[0]._updates._before
        assert before is not None, "the update is not computed again"
        fault.unit = before.part.unit
        fault.size = flip(getattr(before.param, "_local_tensor", before.param), fault.draw)


def sweep(front: str, number: int, seed: int, kinds: Any = tuple(KINDS), **options: Any) -> list[Outcome]:
    """Injects faults of all kinds in turn, each into the second step of an audit; returns those made."""
    draw, outcomes = random.Random(f"{front} {seed}"), []
    model = made(front, **options)
    start = {name: value.clone() for name, value in inner(model).state_dict().items()}
    hook = register_optimizer_step_post_hook(spoil_update)
    for index in range(number):
        inner(model).load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with audit(model, every=1, on_fault=lambda finding: None, seed=seed + index) as watch:
            step(model, optimizer)
            assert not watch.findings, watch.findings
            outcomes.append(faulty_step(kinds[index % len(kinds)], draw, model, optimizer, watch))
    hook.remove()
    return [outcome for outcome in outcomes if outcome.size > 0]


ROUNDS = 1e-4
"""Relative size of a change that may be rounding in a sum."""


def check(outcomes: Sequence[Outcome]) -> None:
    """Checks that what is found is right, and that what is not found is small."""
    for outcome in outcomes:
        if outcome.told:
            assert outcome.right or outcome.kind == "reduce buffer, sent", outcome
        else:
            assert KINDS[outcome.kind] not in ("shard", "gather", "update") and outcome.kind != "output", (
                outcome
            )
            assert outcome.kind != "gradient" and outcome.size < ROUNDS, outcome


SLOW = pytest.mark.slow


@ranks(2)
@pytest.mark.parametrize(
    "front, seed",
    [("flat", 1), ("composable", 1), *(pytest.param(front, 2, marks=SLOW) for front in FRONTS)],
)
def test_flipped_bits_are_found(rank, world_size, front, seed):
    outcomes = sweep(front, (4 if seed == 2 else 1) * len(KINDS), seed)
    assert len({outcome.kind for outcome in outcomes}) > 8
    check(outcomes)
    if seed == 2 and front != "composable":
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        check(sweep(front, 8, 3, kinds=("gather, forward", "gather, backward"), mixed_precision=bf16))


CLEAN: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "all bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "fp16": {"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)},
    "checkpointed": {"net": CheckpointedNet},
    "reentrant": {"net": ReentrantNet},
    "apart": {"travel_together_bytes": 0},
}


def train_clean(model: nn.Module, steps: int) -> None:
    """Trains with all that a program may do in and between steps; each step is audited."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with audit(model, every=1, on_fault="raise") as watch:
        for number in range(steps):
            for context in ([no_sync], [within_copy], [], [])[number % 4]:
                with context(model):
                    model(batch()).square().mean().backward()
            step(model, optimizer)
            with torch.no_grad():
                for param in model.parameters():
                    if type(param) in (nn.Parameter, FlatParameter):
                        param.view(-1)[:1].mul_(2)  # changes one bit, by a write that is counted
                model.eval()
                model(batch())
                model.train()
                for param in model.parameters():  # as some programs do
                    getattr(param, "_local_tensor", param).data.clamp_(-0.9, 0.9)
    assert (watch.steps, watch.findings, watch.skipped) == (steps, [], {})


@ranks(2)
@pytest.mark.parametrize(
    "front, case",
    [
        pytest.param(
            front, case, marks=[] if (front, case) in (("flat", "bf16"), ("orig", "checkpointed")) else [SLOW]
        )
        for case in CLEAN
        for front in ("flat", "orig")
    ],
)
def test_clean_steps_have_no_finding(rank, world_size, front, case):
    train_clean(made(front, **CLEAN[case]), 4)


@ranks(2)
def test_clean_steps_of_parameters_that_are_cut_by_columns(rank, world_size):
    net = FaultyNet()
    net.stem.requires_grad_(False)
    train_clean(shard_columns(net, net.blocks), 4)


def hybrid() -> nn.Module:
    return made("composable", **chosen("composable", "HYBRID_SHARD", 4))


@ranks(4)
def test_replicas_compare_shards(rank, world_size):
    model = hybrid()
    train_clean(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 3:  # before any look
        model.blocks[0].up.weight.to_local().data[0, 0] += 0.1
    with audit(model, every=1, on_fault=lambda finding: None) as watch:
        step(model, optimizer)
    finding = watch.findings[0]
    assert (finding.phase, finding.suspects, finding.unit) == ("shard", (1, 3), "blocks.0")
    assert "one of the ranks 1, 3" in finding.describe()


@SLOW
@ranks(4)
def test_flipped_bits_of_hybrid_meshes_are_found(rank, world_size):
    draw, model = random.Random(5), hybrid()
    for index, kind in enumerate(("gather, forward", "reduced shard", "gradient", "shard, in the step") * 3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with audit(model, every=1, on_fault=lambda finding: None, seed=index) as watch:
            step(model, optimizer)
            outcome = faulty_step(kind, draw, model, optimizer, watch)
        if outcome.size and KINDS[kind] != "reduction":
            assert outcome.right, outcome
        if watch.findings:
            model = hybrid()


@ranks(2)
def test_all_ranks_raise_one_error_and_train_on(rank, world_size):
    model = made("orig")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(CorruptionError) as caught, audit(model, every=1, on_fault="raise"):
        step(model, optimizer)
        fault = Fault("gather, forward" if rank else "", inner(model).blocks[1]._unit, random.Random(3))
        with everywhere.having(fault):
            step(model, optimizer)
    first = caught.value.first
    assert (first.rank, first.unit, first.phase, first.count, first.step) == (1, "blocks.1", "gather", 1, 1)
    told = gather_objects(str(caught.value))
    assert len(set(told)) == 1 and "rank 1, unit 'blocks.1', phase gather" in told[0]
    optimizer.zero_grad()
    with audit(model, every=1, on_fault="raise"):
        step(model, optimizer)


@ranks(2)
def test_what_a_backward_that_raised_has_reduced_is_not_compared(rank, world_size):
    """`reproducible` attaches then, whose reductions have another divisor."""

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    model = shard("flat", Net(), ModuleWrapPolicy({Block}))
    with audit(model, every=1, on_fault="raise"):
        given = batch().requires_grad_()
        given.register_hook(fail)  # when most units have reduced
        with pytest.raises(ArithmeticError):
            model(given).square().mean().backward()
        steps = reproducible(model, micro_batches=8)
        for _ in steps.indices:
            model(batch()).square().mean().backward()


class Unsteady(Block):
    """Computes with numbers that nobody can repeat."""

    numbers = iter(range(1 << 30))

    def forward(self, x):
        return super().forward(x) + next(self.numbers)


class Listed(Block):
    """Has an input that it changes."""

    def forward(self, x, seen=None):
        return super().forward(x)


@ranks(2)
def test_units_that_cannot_be_repeated_are_named_and_no_fault(rank, world_size):
    class Mixed(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Unsteady(), Listed(), Block()])

        def forward(self, x):
            x = self.blocks[0](self.stem(x))
            return self.head(self.blocks[2](self.blocks[1](x, [1])))

    model = shard("composable", Mixed(), ModuleWrapPolicy({Block, Unsteady, Listed}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="cannot repeat the computation of unit"):
        with audit(model, every=1, on_fault="raise") as watch:
            for _ in range(12):
                step(model, optimizer)
    assert watch.skipped.keys() == {"blocks.0", "blocks.1"}
    assert "not deterministic" in watch.skipped["blocks.0"] and "takes a list" in watch.skipped["blocks.1"]


@ranks(2)
def test_an_audit_changes_no_number_and_looks_at_drawn_steps_alone(rank, world_size):
    finals, drawn = [], []
    for audits in (True, False):
        model = made("orig", CheckpointedNet)
        calls: list[int] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        watch = audit(model, every=4, seed=3) if audits else None
        for number in range(16):
            step(model, optimizer)
            if audits and everywhere.sees:
                calls.append(number)
        if watch is not None:
            drawn, steps = calls, watch.steps
            watch.remove()
        finals.append([param.detach().clone() for param in model.parameters()])
    assert not everywhere.sees
    assert all(torch.equal(one, other) for one, other in zip(*finals))
    assert steps in (3, 4) and len(drawn) <= 8


@ranks(2)
@pytest.mark.parametrize(
    "front, options",
    [
        ("composable", {}),
        ("orig", {}),
        ("flat", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    ],
    ids=["composable", "orig", "whole"],
)
def test_ranks_meet_alike_whatever_each_of_them_runs(rank, world_size, front, options):
    finals = []
    for audits in (True, False):
        torch.manual_seed(0)
        model = shard(front, Net(), ModuleWrapPolicy({Block}), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        programs = apart.programs_for(model)
        with audit(model, every=1, on_fault="raise") if audits else nullcontext() as watch:
            for program in programs:
                program(model, optimizer, lambda model: model(batch()).square().mean())
        if watch is not None:
            # The first step of an optimizer beside another one does not count; one program has two steps.
            steps = len(programs) - 1 + (apart.evaluation_alone in programs)
            assert (watch.steps, watch.findings, watch.skipped) == (steps, [], {})
        finals.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*finals))


def test_sums_tell_the_place_of_a_change():
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 10_000).to(dtype)
        before = bit_sums(rows)
        flip(rows[1], random.Random(1))
        apart = (bit_sums(rows) - before).tolist()
        assert [any(row) for row in apart] == [False, True, False]
        place = changed_place(10_000, *apart[1])
        rows[1, place] = 0.5
        assert place is not None
        flip(rows[1], random.Random(2))
        assert changed_place(10_000, *(bit_sums(rows) - before)[1].tolist()) is None
    assert block_sums(rows.float(), 16)[1].sum().item() == pytest.approx(rows.float().abs().sum().item())


def test_what_many_have_gathered_wrong_was_sent_wrong():
    def gathered(rank: int, owner: int) -> Corruption:
        return Corruption(rank, 3, "gather", "a", "the gathered buffer of 'a.weight'", "", owner=owner)

    members = frozenset(range(4))
    (one,) = causes([gathered(2, 0)], lambda name: members)
    assert one.rank == 2
    (sender,) = causes([gathered(rank, 0) for rank in (1, 2, 3)], lambda name: members)
    assert sender.rank == 0 and "sent wrong" in sender.describe()
    shard = Corruption(0, 3, "shard", "a", "the shard of 'a.weight'", "")
    assert causes([gathered(1, 0), shard], lambda name: members) == [shard]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="no wrapped or sharded module"):
        audit(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="every=0"):
        audit(nn.Linear(1, 1), every=0)
    with pytest.raises(TypeError, match="seed must be an int, not '0'"):
        audit(nn.Linear(1, 1), seed="0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_fault='stop'"):
        audit(nn.Linear(1, 1), on_fault="stop")  # type: ignore[arg-type]
