"""Generated programs: a sharded model and a plain one do the same events, and are compared after each.

A program is a line of text, such as

    2 orig FULL_SHARD tied momentum alone : audit step:TF,twice uneven:n1202,weights join

with the number of ranks, the front-end, the strategy, the net (`generated_nets.py`), the optimizer, flags,
and the events. An event is a name of `EVENTS`, with options after a colon. To add one, write how each side
does it, and what cannot go with it (`fits`).
"""

from __future__ import annotations

import copy
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

import fsdp_wrap
from fronts import accumulating, assert_tensors, clip, full_state
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._uneven.rounds import LeftByError
from fsdp_wrap.distributed_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_wrap.optim import HostAdamW, step_in_backward
from generated_nets import FRONTS, NETS, ROWS, WIDTH, Fuse, Net, lacks, make, shard_net
from models import named_state

NEAR: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
DIVERGED = 1e4
"""Values begin near one: training in which one becomes larger than this has diverged."""
FULL = StateDictOptions(full_state_dict=True)
OPTIMIZERS = ("sgd", "momentum", "adamw", "host", "in_backward", "in_thread")
IN_BACKWARD = {"in_backward", "in_thread"}
WRAPPERS = ("flat", "orig")
FLAGS = {
    "alone": FRONTS,
    "offload": (*WRAPPERS, "composable"),
    "ahead": WRAPPERS,
    "overwrites": WRAPPERS,
    "seldom": FRONTS,
}
"""Which front-ends have a flag. Units have collectives of their own, lie on the host, gather ahead in
forward, put gradients in the place of parameters; values are compared at the end alone."""


class Item(NamedTuple):
    """One event of a schedule."""

    event: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join(filter(None, [self.event, ",".join(self.options)]))

    @classmethod
    def of(cls, text: str) -> Item:
        event, _, options = text.partition(":")
        return cls(event, tuple(filter(None, options.split(","))))

    def option(self, among: Sequence[str], default: str) -> str:
        return next((option for option in self.options if option in among), default)

    def counts(self, size: int) -> list[int]:
        """Returns the number of batches of each rank, by the digits of an option."""
        digits = next((option[1:] for option in self.options if option[0] == "n"), "1202")
        return [int(digit) for digit in digits[:size]]


@dataclass(frozen=True)
class Program:
    """What a program is made of."""

    size: int
    front: str
    strategy: str
    net: str
    optimizer: str
    flags: tuple[str, ...]
    items: tuple[Item, ...]

    def __str__(self) -> str:
        words = [self.size, self.front, self.strategy, self.net, self.optimizer, ",".join(self.flags)]
        return " ".join(filter(None, map(str, [*words, ":", *self.items])))

    @classmethod
    def of(cls, text: str) -> Program:
        head, _, items = text.partition(" :")
        size, front, strategy, net, optimizer, flags = [*head.split(), ""][:6]
        given = tuple(flags.split(",")) if flags else ()
        return cls(int(size), front, strategy, net, optimizer, given, (*map(Item.of, items.split()),))

    @property
    def edits(self) -> bool:
        return any(item.event == "edit" for item in self.items)

    @property
    def can_run(self) -> bool:
        """Whether all of its parts can be combined."""
        return (
            (self.strategy != "HYBRID_SHARD" or self.size == 4)
            and (self.strategy != "NO_SHARD" or self.front in WRAPPERS)
            and (self.strategy == "FULL_SHARD" or self.front != "replicate")
            and all(self.front in FLAGS[flag] for flag in self.flags)
            # A `FlatParameter` is frozen as a whole, tied weights among them.
            and not (self.front == "flat" and self.net == "tied" and Item("toggle") in self.items)
            # It has zeros for what lacks a gradient: momentum and decay go on.
            and not (self.front == "flat" and self.net == "experts" and self.optimizer != "sgd")
            and self.optimizer not in lacks(self.net)
            and all(fits(item, self) for item in self.items)
        )


@dataclass
class Side:
    """A net in training: sharded, or plain, which does what all ranks do."""

    net: Net
    program: Program
    rank: int
    optimizer: Any
    is_plain: bool
    notes: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    watchers: dict[str, AbstractContextManager[Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.program.size

    @property
    def model(self) -> Any:
        return self.net.models()[0]

    @property
    def in_backward(self) -> bool:
        return self.program.optimizer in IN_BACKWARD

    def note(self, what: str, value: torch.Tensor) -> None:
        """Notes a value that must be equal on both sides."""
        self.notes.append((what, value.detach().clone()))

    def params(self) -> list[nn.Parameter]:
        return [*dict.fromkeys(param for model in self.net.models() for param in model.parameters())]

    def finish(self, item: Item) -> None:
        """Clips, steps and zeroes."""
        if "clip" in item.options:
            self.note("norm", clip(self.model, 0.05))
        self.optimizer.step()
        if self.in_backward:  # which has freed them
            self.optimizer.zero_grad()
        elif "left" not in item.options:
            self.optimizer.zero_grad(set_to_none="in_place" not in item.options)

    def unwatch(self) -> None:
        """Ends all contexts that look at values."""
        for watcher in self.watchers.values():
            watcher.__exit__(None, None, None)
        self.watchers.clear()


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


# ---- what is computed with a micro-batch


def once(side: Side, rank: int, number: int) -> torch.Tensor:
    return side.net.loss(batch(rank, number))


def twice(side: Side, rank: int, number: int) -> torch.Tensor:
    return side.net.loss(batch(rank, number)) + side.net.loss(batch(rank, number + 50))


def penalty(side: Side, rank: int, number: int) -> torch.Tensor:
    x = batch(rank, number).requires_grad_()
    loss = side.net.loss(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def fgsm(side: Side, rank: int, number: int) -> torch.Tensor:
    """Moves the inputs where the loss is larger."""
    x = batch(rank, number).requires_grad_()
    (slope,) = torch.autograd.grad(side.net.loss(x), x)
    return side.net.loss((x + 0.1 * slope).detach())


def saliency(side: Side, rank: int, number: int) -> torch.Tensor:
    """Takes the gradient of the inputs beside the loss, of one forward."""
    x = batch(rank, number).requires_grad_()
    loss = side.net.loss(x)
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    if rank == side.rank:
        side.note("slope", slope)
    return loss


def hvp(side: Side, rank: int, number: int) -> torch.Tensor:
    """Moves the inputs by a product with the Hessian."""
    x = batch(rank, number).requires_grad_()
    (slope,) = torch.autograd.grad(side.net.loss(x), x, create_graph=True)
    (product,) = torch.autograd.grad(slope.sin().sum(), x)
    return side.net.loss((x + 0.1 * product).detach())


def between(side: Side, rank: int, number: int) -> torch.Tensor:
    """Evaluates between forward and backward."""
    loss = side.net.loss(batch(rank, number))
    evaluate(side, rank, number + 50)
    return loss


def before(side: Side, rank: int, number: int) -> torch.Tensor:
    """Evaluates before the forward."""
    evaluate(side, rank, number + 50)
    return side.net.loss(batch(rank, number))


def late(side: Side, rank: int, number: int) -> torch.Tensor:
    """One rank comes to its backward later than the others."""
    loss = side.net.loss(batch(rank, number))
    if not side.is_plain and rank == 0:
        gc.collect()
        time.sleep(0.01)
    return loss


COMPUTES: dict[str, Callable[[Side, int, int], torch.Tensor]] = {
    compute.__name__: compute
    for compute in (once, twice, penalty, fgsm, saliency, hvp, between, before, late)
}


def evaluate(side: Side, rank: int, number: int) -> None:
    with torch.no_grad():
        loss = side.net.loss(batch(rank, number))
    if rank == side.rank:
        side.note("evaluated", loss)


def loss_of(side: Side, item: Item, rank: int, number: int) -> torch.Tensor:
    """Returns the loss of a micro-batch; notes that of the own rank."""
    loss = COMPUTES[item.option([*COMPUTES], "once")](side, rank, number)
    if rank == side.rank:
        side.note("loss", loss)
    return loss


# ---- events: how the plain model does each, and how the sharded one


def plain_mean(side: Side, item: Item, numbers: Sequence[int]) -> None:
    for number in numbers:
        for rank in range(side.size):
            (loss_of(side, item, rank, number) / side.size).backward()


LETTERS = ("F", "TF", "FF", "TTF", "FTF")


def plain_step(side: Side, item: Item, at: int) -> None:
    plain_mean(side, item, [at + index for index, _ in enumerate(item.option(LETTERS, "F"))])
    side.finish(item)


def own_step(side: Side, item: Item, at: int) -> None:
    for index, letter in enumerate(item.option(LETTERS, "F")):
        with ExitStack() as stack:
            for model in side.net.models():
                stack.enter_context(accumulating(model, letter))
            loss_of(side, item, side.rank, at + index).backward()
    side.finish(item)


def plain_backward(side: Side, item: Item, at: int) -> None:
    plain_mean(side, item, [at])


def own_backward(side: Side, item: Item, at: int) -> None:
    loss_of(side, item, side.rank, at).backward()


def plain_evaluation(side: Side, item: Item, at: int) -> None:
    for rank, count in enumerate(_counts_of_evaluation(side, item)):
        for index in range(count):
            evaluate(side, rank, at + index)


def own_evaluation(side: Side, item: Item, at: int) -> None:
    with fsdp_wrap.uneven(*side.net.models()) if "uneven" in item.options else nullcontext():
        for index in range(_counts_of_evaluation(side, item)[side.rank]):
            evaluate(side, side.rank, at + index)


def _counts_of_evaluation(side: Side, item: Item) -> list[int]:
    return item.counts(side.size) if "uneven" in item.options else [2] * side.size


def _weight(item: Item, rank: int, index: int) -> float:
    return 1.0 + 2 * rank + index if "weights" in item.options else 1.0


def plain_uneven(side: Side, item: Item, at: int) -> None:
    counts = item.counts(side.size)
    if side.in_backward:  # each backward is a step of those that have a batch
        plain_rounds(side, item, at, counts, side.size if "sums" in item.options else 0)
        return
    every = [(rank, index) for rank, count in enumerate(counts) for index in range(count)]
    whole = side.size if "sums" in item.options else sum(_weight(item, *one) for one in every)
    for rank, index in every:
        loss = loss_of(side, item, rank, at + index)
        (loss * _weight(item, rank, index) / whole).backward()
    side.finish(item)


def own_uneven(side: Side, item: Item, at: int) -> None:
    average = "sums" not in item.options
    with fsdp_wrap.uneven(*side.net.models(), average=average) as work:
        for index in range(item.counts(side.size)[side.rank]):
            loss = loss_of(side, item, side.rank, at + index)
            if "weights" in item.options:
                work.backward(loss, weight=_weight(item, side.rank, index))
            else:
                work.backward(loss)
    side.finish(item)


def plain_failure(side: Side, item: Item, at: int) -> None:
    """Runs a forward without a backward: gradients stay as they were."""
    loss_of(side, item, side.rank, at)


def own_failure(side: Side, item: Item, at: int) -> None:
    """One rank leaves `uneven` by an error between two micro-batches, and so do all."""
    with suppress(ArithmeticError, LeftByError), fsdp_wrap.uneven(*side.net.models()) as work:
        work.backward(loss_of(side, item, side.rank, at))
        if side.rank == at // 100 % side.size:
            raise ArithmeticError("on purpose")
        side.net.loss(batch(side.rank, at + 1))


def unshards(side: Side, item: Item, at: int) -> None:
    """Gathers by hand what the next event will use."""
    if not side.is_plain:
        for model in side.net.models():
            model.unshard()


def plain_rounds(side: Side, item: Item, at: int, counts: Sequence[int], divisor: int) -> None:
    """Steps with those that have a batch still; their gradients are divided by their number, or as given."""
    for index in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if index < count]
        for rank in active:
            (loss_of(side, item, rank, at + index) / (divisor or len(active))).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()


def plain_join(side: Side, item: Item, at: int) -> None:
    by_all = side.size if "by_all" in item.options else 0
    for epoch in range(2 if "again" in item.options else 1):
        plain_rounds(side, item, at + 20 * epoch, item.counts(side.size), by_all)


def own_join(side: Side, item: Item, at: int) -> None:
    options = {"divide_by_initial_world_size": "by_all" in item.options, "optimizer": side.optimizer}
    for epoch in range(2 if "again" in item.options else 1):
        with Join(side.net.models(), **options):
            for index in range(item.counts(side.size)[side.rank]):
                loss_of(side, item, side.rank, at + 20 * epoch + index).backward()
                side.optimizer.step()
                side.optimizer.zero_grad()


def plain_reproducible(side: Side, item: Item, at: int) -> None:
    side.optimizer.zero_grad()
    for index in range(2):
        for rank in range(side.size):
            (loss_of(side, item, rank, at + index) / (2 * side.size)).backward()
    side.finish(item)


def own_reproducible(side: Side, item: Item, at: int) -> None:
    side.optimizer.zero_grad()
    work = fsdp_wrap.reproducible(side.model, micro_batches=2 * side.size)
    for index in range(2):
        loss_of(side, item, side.rank, at + index).backward()
    side.finish(item)
    work.remove()


def raises(side: Side, item: Item, at: int) -> None:
    """All ranks catch an error of one module, and drop what has been computed."""
    fuses = [module for module in side.net.modules() if isinstance(module, Fuse)]
    fuse = fuses[len(fuses) // 2]
    fuse.armed = item.option(["forward", "backward"], "forward")
    with suppress(ArithmeticError):
        side.net.loss(batch(side.rank, at)).backward()
    fuse.armed = None
    side.optimizer.zero_grad()


def toggles(side: Side, item: Item, at: int) -> None:
    """Freezes a unit, or lets it train again."""
    side.optimizer.zero_grad()
    units = side.net.units()
    params = [*units[at // 100 % len(units)].parameters()]
    for param in params:
        param.requires_grad_(not param.requires_grad)


def plain_edit(side: Side, item: Item, at: int) -> None:
    """Changes the parameters of the first model."""
    with torch.no_grad():
        for param in side.model.parameters():
            param.mul_(0.9)


def own_edit(side: Side, item: Item, at: int) -> None:
    side.unwatch()  # an audit knows updates alone
    if side.program.front not in WRAPPERS or "shards" in item.options:
        plain_edit(side, item, at)
        return
    with FSDP.summon_full_params(side.model):
        plain_edit(side, item, at)


def loads(side: Side, item: Item, at: int) -> None:
    """Loads a state that differs, and the optimizer's own, if any: else torch's functions make one up."""
    side.unwatch()
    earlier = {item.event for item in side.program.items[: at // 100 - 1]}
    has_state = side.program.optimizer != "sgd" and bool(earlier & {"step", "uneven", "join", "reproducible"})
    for model in side.net.models():
        state = {name: value * 1.1 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    if side.is_plain:
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    elif len(side.net.roots) == 1 and has_state:
        state = get_optimizer_state_dict(side.model, side.optimizer, options=FULL)
        set_optimizer_state_dict(side.model, side.optimizer, state, options=FULL)


def watches(side: Side, item: Item, at: int) -> None:
    """Begins to look at values, or ends that."""
    if side.is_plain:
        return
    if item.event in side.watchers:
        side.watchers.pop(item.event).__exit__(None, None, None)
        return
    watcher: Any = {
        "audit": partial(fsdp_wrap.audit, side.net, every=1, on_fault="raise"),
        "find": partial(fsdp_wrap.find_nonfinite, side.net, modules="units" not in item.options),
        "record": fsdp_wrap.record_events,
    }[item.event]()
    watcher.__enter__()
    side.watchers[item.event] = watcher


class Event(NamedTuple):
    """How the plain model and the sharded one do it; of each group of options an item has one or none."""

    plain: Callable[[Side, Item, int], None]
    own: Callable[[Side, Item, int], None]
    groups: Sequence[Sequence[str]] = ()


COMPUTE = (*COMPUTES,)
COUNTS = ("n1011", "n0121", "n1202", "n2110", "n0202", "n2013", "n1111", "n3120")
ENDS = ("left", "in_place")
EVENTS: dict[str, Event] = {
    "step": Event(plain_step, own_step, [LETTERS, COMPUTE, ENDS, ("clip",)]),
    "backward": Event(plain_backward, own_backward, [COMPUTE]),
    "evaluate": Event(plain_evaluation, own_evaluation, [("uneven",), COUNTS]),
    "uneven": Event(plain_uneven, own_uneven, [COUNTS, ("weights", "sums"), COMPUTE, ENDS, ("clip",)]),
    "join": Event(plain_join, own_join, [COUNTS, ("by_all",), ("again",), COMPUTE]),
    "reproducible": Event(plain_reproducible, own_reproducible, [COMPUTE, ENDS, ("clip",)]),
    "fail": Event(plain_failure, own_failure, [COMPUTE]),
    "unshard": Event(unshards, unshards),
    "raise": Event(raises, raises, [("forward", "backward")]),
    "toggle": Event(toggles, toggles),
    "edit": Event(plain_edit, own_edit, [("shards",)]),
    "load": Event(loads, loads),
    "audit": Event(watches, watches),
    "find": Event(watches, watches, [("units",)]),
    "record": Event(watches, watches),
}


OF_INPUTS = {"penalty", "fgsm", "saliency", "hvp"}
WATCHES = ("audit", "find", "record")


def fits(item: Item, program: Program) -> bool:
    """Whether a program can have an event: what is refused by name is not generated."""
    event, options = item.event, {*item.options}
    if {event, *options} & lacks(program.net):
        return False
    if event == "join" and (program.front not in WRAPPERS or program.optimizer in IN_BACKWARD):
        return False
    if event == "unshard" and (program.front in WRAPPERS or program.edits):
        return False  # an open fault: an edit after `unshard()`, with nothing in between, is not seen
    if event == "reproducible" and program.optimizer in {"host", *IN_BACKWARD}:
        return False
    if program.optimizer in IN_BACKWARD:
        if event in ("backward", "fail") or options & {"clip", "weights", "saliency", "FF", "FTF"}:
            return False  # each backward is a step
        if event == "raise" and "backward" in options:
            return False  # some units have been updated
    if program.net == "experts" and options & OF_INPUTS:
        # An open fault: a gradient of inputs alone also reduces parts that ranks may skip.
        return event != "reproducible" and not (program.optimizer in IN_BACKWARD and options & {"TF", "TTF"})
    return True


# ---- a program's run


def run(program: Program, rank: int) -> None:
    """Does the events on both sides; fails at the first difference."""
    plain_net = make(program.net)
    net = copy.deepcopy(plain_net)
    shard_net(net, program.front, program.strategy, program.flags)
    plain = Side(plain_net, program, rank, None, True)
    own = Side(net, program, rank, None, False)
    for side in (plain, own):
        side.optimizer = _optimizer(side)
    warnings.simplefilter("ignore")
    for place, item in enumerate(program.items):
        for side in (plain, own):
            event = EVENTS[item.event]
            (event.plain if side.is_plain else event.own)(side, item, 100 * (place + 1))
        _compare(plain, own, f"after event {place + 1}, {item}", "seldom" not in program.flags)
    own.unwatch()
    _compare(plain, own, "at the end", True)


def _delay_backward(net: Net) -> None:
    """Lets a rank's backward wait for its thread, as a rank that computes more does."""
    for module in net.modules():
        if isinstance(module, Fuse):
            module.pause = 0.003


class Late(HostAdamW):
    """Is late with each update, as a thread of a busy machine may be."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.003)
        return super().step(closure)


def _optimizer(side: Side) -> torch.optim.Optimizer:
    kind = side.program.optimizer
    numbers: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    if kind in ("sgd", "momentum"):
        return torch.optim.SGD(side.params(), lr=0.005, momentum=0.9 * (kind == "momentum"))
    if side.is_plain or kind == "adamw":
        return torch.optim.AdamW(side.params(), **numbers)
    if kind == "host":
        return HostAdamW(side.params(), **numbers)
    if kind == "in_thread":
        made = Late if side.rank % 2 else HostAdamW
        if side.rank % 2 == 0 and "raise" not in side.net.lacks:
            _delay_backward(side.net)
        return step_in_backward(side.model, lambda params: made(params, **numbers), in_thread=True)
    return step_in_backward(side.model, lambda params: torch.optim.AdamW(params, **numbers))


def _compare(plain: Side, own: Side, when: str, values: bool) -> None:
    """Fails where the sharded side has other notes, gradients that are left, or other parameters."""
    expected, notes = plain.notes, own.notes
    plain.notes, own.notes = [], []
    assert sorted(what for what, _ in notes) == sorted(what for what, _ in expected), when
    wanted: dict[str, list[torch.Tensor]] = {}
    for what, value in expected:
        wanted.setdefault(what, []).append(value)
    for what, value in notes:
        told = f"wrong {what} {when}: {{}}".format
        torch.testing.assert_close(value, wanted[what].pop(0), msg=told, equal_nan=True, **NEAR)
    if all(param.grad is None or not param.grad.any() for param in plain.params()):
        for name, param in (named for model in own.net.models() for named in model.named_parameters()):
            has = param.grad is not None and bool(_local(param.grad).any())
            assert not has, f"a gradient is left of {name} {when}"
    for model, other in zip(own.net.models(), plain.net.models()) if values else ():
        state = {name: value.detach() for name, value in named_state(other)}
        if diverged := _diverged(state):
            assert _diverged(full_state(model)) == diverged, f"other values diverge {when}"
            continue  # there are no numbers to compare
        largest = max((value.abs().max().item() for value in state.values() if value.numel()), default=0.0)
        growth = largest if largest > DIVERGED else 1.0  # rounding grows with the values
        try:
            assert_tensors(full_state(model), state, rtol=growth * NEAR["rtol"], atol=NEAR["atol"])
        except AssertionError as error:
            raise AssertionError(f"wrong values {when}: {error}") from None


def _diverged(state: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in state.items() if not value.isfinite().all()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


# ---- draws


def draw(seed: str) -> Program:
    """Draws a program: few kinds of events, some of which come again and again."""
    generator = random.Random(seed)
    while True:
        program = _drawn(generator)
        if program.items and program.can_run:
            return program


def _drawn(generator: random.Random) -> Program:
    size = 4 if generator.random() < 0.05 else 2
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    base = Program(
        size,
        generator.choice(["flat", "orig", "orig", "composable", "composable", "replicate"]),
        generator.choice([*strategies, "HYBRID_SHARD", "HYBRID_SHARD"] if size == 4 else strategies),
        generator.choice([*NETS]),
        generator.choice([*OPTIMIZERS]),
        (),
        (),
    )
    flags = tuple(flag for flag in FLAGS if base.front in FLAGS[flag] and generator.random() < 0.25)
    kinds = generator.sample(["step", "step", "uneven", "uneven", *EVENTS], 3)
    computes = generator.sample(COMPUTE, 3)
    items = [Item(event) for event in WATCHES if generator.random() < 0.25]
    items += [_item(generator, generator.choice(kinds), computes) for _ in range(generator.randint(3, 8))]
    items += [Item("step")] * 2  # what came before must leave nothing behind
    return replace(base, flags=flags, items=tuple(item for item in items if fits(item, base)))


def _item(generator: random.Random, event: str, computes: Sequence[str]) -> Item:
    options = []
    for group in EVENTS[event].groups:
        among = computes if group is COMPUTE else group
        if generator.random() < (0.7 if len(among) > 2 else 0.4):
            options.append(generator.choice(among))
    return Item(event, tuple(option for option in options if option not in ("once", "F")))


# ---- shrinking


def smaller(program: Program) -> Iterator[Program]:
    """Yields what is left of a program without a part, the largest parts first."""
    items = program.items
    length = len(items) // 2
    while length:
        for place in range(0, len(items) - length + 1, length):
            yield replace(program, items=items[:place] + items[place + length :])
        length //= 2
    if program.size > 2:
        yield replace(program, size=2)
    for flag in program.flags:
        yield replace(program, flags=tuple(one for one in program.flags if one != flag))
    for simple in ({"strategy": "FULL_SHARD"}, {"net": "plain"}, {"optimizer": "sgd"}):
        changes: dict[str, Any] = {**simple}
        if replace(program, **changes) != program:
            yield replace(program, **changes)
    for place, item in enumerate(items):
        for option in item.options:
            less = Item(item.event, tuple(one for one in item.options if one != option))
            yield replace(program, items=(*items[:place], less, *items[place + 1 :]))


def shrink(program: Program, fails: Callable[[Program], bool], tries: int) -> Program:
    """Returns a smaller program that fails in the same way."""
    known = {program}
    while tries:
        candidates = (one for one in smaller(program) if one not in known and one.items and one.can_run)
        candidate = next(candidates, None)
        if candidate is None:
            break
        known.add(candidate)
        tries -= 1
        if fails(candidate):
            program = candidate
    return program
