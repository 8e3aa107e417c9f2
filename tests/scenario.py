"""One training run described by options, wrapped and plain side by side in float64.

`SPACE` holds every option's values. `check` trains a wrapped model as a scenario says and compares each loss
and the final parameters with a plain model that sees the batches of all ranks.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from fronts import accumulating, full
from fsdp_wrap import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy

Scenario = dict[str, Any]

SPACE: dict[str, Sequence[Any]] = {
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "use_orig_params": [False, True],
    "backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", None],
    "forward_prefetch": [False, True],
    "offload": [False, True],
    "limit_all_gathers": [True, False],
    "wrapping": ["whole", "block", "linear", "always", "by_hand"],
    "frozen": ["nothing", "second_blocks", "embed", "all_but_norms", "all_but_last"],
    "unfreeze": [False, True],
    "tied": ["nothing", "embed_head", "blocks"],
    "checkpointing": ["none", "reentrant", "early_stop", "no_early_stop"],
    "accumulation": ["F", "FF", "TF", "TTF", "FTF"],
    "zeroing": ["to_none", "in_place"],
    "fault": [None, "forward", "backward"],
    "forwards": [1, 2],
    "evaluates": [False, True],
    "input_grad": [False, True],
}
COMPOSABLE_SPACE: dict[str, Sequence[Any]] = {
    "front": ["fully_shard"],
    "reshard": [None, True, False],
    "kept_after_backward": [False, True],
    "prefetch": ["default", "explicit"],
    "columns": [False, True],
    "wrapping": ["whole", "block", "linear", "always", "by_hand", "group"],
    "offload": [False, True],
    **{
        name: SPACE[name]
        for name in (
            *("frozen", "unfreeze", "tied", "checkpointing", "accumulation", "zeroing", "fault"),
            *("forwards", "evaluates", "input_grad"),
        )
    },
}
"""Options of `fully_shard`; those of the wrapper that it has as well, and its own."""

REPLICATE_SPACE = {name: values for name, values in COMPOSABLE_SPACE.items() if name != "columns"} | {
    "front": ["replicate", "mixed"]
}
"""Options of `replicate`, for all units or for every second one beside `fully_shard`."""

WITHIN_COPIES = {"accumulation": [*SPACE["accumulation"], "CF", "CCF", "TCF", "CTF", "FCF"]}
"""Sums over the replicas come with the last backward then."""
HYBRID_COMPOSABLE_SPACE = {
    **COMPOSABLE_SPACE,
    **WITHIN_COPIES,
    "mesh": ["hybrid", "flat"],
    "reshard": [None, True, False, 2],
}
HYBRID_SPACE = {
    **SPACE,
    **WITHIN_COPIES,
    "strategy": ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "FULL_SHARD", "NO_SHARD"],
}

INITS: dict[str, Sequence[Any]] = {"init": ["values", "filled", "replaced", "received"]}
"""How a wrapped model on the host gets its values: before, by `param_init_fn` in two ways, or from a rank."""

ORDERS: dict[str, Sequence[Any]] = {
    "in_flight": [None, 1, 2],
    "storage_stays": [False, True],
    "ended_by_hand": [False, True],
}
"""Of `fully_shard`: reductions at once, where unsharded memory is, and who ends a backward."""
UNEVEN: dict[str, Sequence[Any]] = {
    "batches": ["fewer", "weighted"],
    "accumulation": ["F", "FF", "TF", "FT", "TT", "FTT"],
    "forwards": [1],
}
"""A step is two contexts of `uneven`, where a rank has a batch less than another; weights may differ.

Its end reduces what `no_sync` has left. Ranks that run several forwards before a backward would have to have
equally many batches.
"""

WIDTH, VOCABULARY, STEPS = 8, 11, 3


def pairwise(
    space: Mapping[str, Sequence[Any]], seed: int, settle: Callable[[Scenario], Scenario] = dict
) -> list[Scenario]:
    """Few scenarios in which every value of an option meets every value of every other one.

    Where one value decides about another, `settle` does so; pairs that it does not leave alone cannot be.
    """
    generator = random.Random(seed)
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(space, 2)
        for x in space[a]
        for y in space[b]
    }
    left = {pair for pair in left if pair <= settle(dict(pair)).items()}
    chosen: list[Scenario] = []
    while left:
        seeds = sorted(left, key=lambda pair: sorted(map(str, pair)))
        candidates = [settle(draw(space, generator, dict(generator.choice(seeds)))) for _ in range(40)]
        best = max(candidates, key=lambda scenario: len(left & _pairs(scenario)))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


def draw(
    space: Mapping[str, Sequence[Any]], generator: random.Random, fixed: Scenario | None = None
) -> Scenario:
    return {name: generator.choice(values) for name, values in space.items()} | (fixed or {})


def _pairs(scenario: Scenario) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(scenario.items(), 2)}


def name_of(scenario: Scenario) -> str:
    return "-".join(str(value) for value in scenario.values())


class Block(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return self._compute(x)
        if self.checkpointing == "reentrant":
            return checkpoint(self._compute, x, use_reentrant=True)
        early = self.checkpointing == "early_stop"
        return checkpoint(self._compute, x, use_reentrant=False, early_stop=early)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(self.fc1(self.norm(x)).tanh())
        return x + y + self.adapter(x)


class Model(nn.Module):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(scenario["checkpointing"]) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if scenario["tied"] == "embed_head":
            self.head.weight = self.embed.weight
        elif scenario["tied"] == "blocks":
            self.blocks[2].fc1.weight = self.blocks[0].fc1.weight
        for name, param in self.named_parameters():
            param.requires_grad_(not _is_frozen(name, scenario["frozen"]))

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _is_frozen(name: str, frozen: str) -> bool:
    return {
        "nothing": False,
        "second_blocks": name.startswith(("blocks.0", "blocks.2")),
        "embed": name.startswith("embed"),
        "all_but_norms": "norm" not in name,
        "all_but_last": not name.startswith(("blocks.2", "head.bias")),
    }[frozen]


def _shard(model: Model, scenario: Scenario) -> nn.Module:
    hybrid = scenario.get("mesh") == "hybrid"
    sizes = (2, dist.get_world_size() // 2) if hybrid else (dist.get_world_size(),)

    def placement(param: nn.Parameter) -> Shard | None:
        even = param.ndim == 2 and param.shape[1] % sizes[-1] == 0
        return Shard(1) if scenario.get("columns") and even else None

    replicated = {"fully_shard": (), "replicate": (0, 1), "mixed": (1,)}[scenario["front"]]
    for number, part in enumerate(_parts(model, scenario["wrapping"])):
        reshard = scenario["reshard"]
        options: dict[str, Any] = {
            "mesh": init_device_mesh(model.head.weight.device.type, sizes),
            "offload_policy": CPUOffloadPolicy() if scenario["offload"] else OffloadPolicy(),
        }
        if number % 2 in replicated:
            replicate(part, **options)
            if reshard is not None:
                unit = part[0] if isinstance(part, list) else part
                unit.set_reshard_after_forward(reshard, recurse=False)
            continue
        options["reshard_after_forward"] = True if hybrid and reshard == 2 else reshard
        fully_shard(part, shard_placement_fn=placement, **options)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if scenario["prefetch"] == "explicit":
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])
            unit.set_modules_to_backward_prefetch(units[max(0, index - 2) : index])
    model.set_reshard_after_backward(not scenario["kept_after_backward"])
    model.set_keep_unsharded_storage(scenario.get("storage_stays", False))
    model.set_manual_backward_finalization(scenario.get("ended_by_hand", False))
    if scenario.get("in_flight") is not None:
        model.set_reduce_scatter_max_input_buffers(scenario["in_flight"])
    return model


def _parts(model: Model, wrapping: str) -> list[Any]:
    """Returns the modules for `fully_shard`, in the order of the calls."""
    leaves = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    every = [module for module in reversed(list(model.modules())) if not isinstance(module, nn.ModuleList)]
    return {
        "whole": [model],
        "block": [*model.blocks, model],
        "linear": [*leaves, model],
        "always": every,
        "by_hand": [model.blocks[0].fc1, model.blocks[0], model.blocks[2], model.head, model],
        "group": [[model.blocks[0], model.blocks[1].adapter], [model.embed, model.head], model],
    }[wrapping]


def _unsharded(initial: Model, scenario: Scenario, rank: int) -> Model:
    """Returns a model with the initial values, or on the meta device, where it gets them as it is wrapped."""
    if scenario.get("init", "values") == "values" or (scenario["init"] == "received" and rank == 0):
        return copy.deepcopy(initial)
    with torch.device("meta"):
        return Model(scenario).double()


def _giving(initial: Model, model: Model, replaces: bool) -> Callable[[nn.Module], None]:
    """Returns a `param_init_fn` that gives a module its own parameters of the initial model.

    Of a tied one the first module's values count: the others get none.
    """
    sources = dict(zip(model.modules(), initial.modules()))
    first: dict[nn.Parameter, nn.Module] = {}

    def give(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for name, source in sources[module].named_parameters(recurse=False):
            value = source.detach().clone()
            if first.setdefault(source, module) is not module:
                value.fill_(torch.nan)
            if replaces:
                setattr(module, name, nn.Parameter(value))
            else:
                module.get_parameter(name).data.copy_(value)

    return give


def _wrapped(model: Model, scenario: Scenario, initial: Model) -> FSDP:
    prefetch, init = scenario["backward_prefetch"], scenario.get("init")
    kwargs: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[scenario["strategy"]],
        "backward_prefetch": BackwardPrefetch[prefetch] if prefetch else None,
        "forward_prefetch": scenario["forward_prefetch"],
        "cpu_offload": CPUOffload(offload_params=scenario["offload"]),
        "limit_all_gathers": scenario["limit_all_gathers"],
        "use_orig_params": scenario["use_orig_params"],
    }
    if init in ("filled", "replaced"):
        kwargs["param_init_fn"] = _giving(initial, model, init == "replaced")
    kwargs["sync_module_states"] = init == "received"
    if "HYBRID" in scenario["strategy"]:
        device = initial.head.weight.device.type
        kwargs["device_mesh"] = init_device_mesh(device, (2, dist.get_world_size() // 2))
    if scenario["wrapping"] == "by_hand":
        model.blocks[0].fc1 = FSDP(model.blocks[0].fc1, **kwargs)
        model.blocks[0] = FSDP(model.blocks[0], **kwargs)
        model.blocks[2] = FSDP(model.blocks[2], **kwargs)
        model.head = FSDP(model.head, **kwargs)  # type: ignore[assignment]
    policy = {
        "block": ModuleWrapPolicy({Block}),
        "linear": ModuleWrapPolicy({nn.Linear, nn.Embedding}),
        "always": always_wrap_policy,
    }.get(scenario["wrapping"])
    return FSDP(model, auto_wrap_policy=policy, **kwargs)


class _Batches:
    """Inputs by rank and number; the same for the wrapped and the plain model."""

    def __init__(self, scenario: Scenario, device: torch.device | None) -> None:
        # Reentrant checkpointing trains nothing where no input of it needs a gradient, plain module or not.
        self._input_grad = scenario["input_grad"] or scenario["checkpointing"] == "reentrant"
        self._device = device or torch.device("cpu")

    def loss(self, model: nn.Module, rank: int, number: int, forwards: int) -> torch.Tensor:
        losses = [self._one(model, rank, 10 * number + repeat) for repeat in range(forwards)]
        return torch.stack(losses).sum()

    def _one(self, model: nn.Module, rank: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tokens = torch.randint(0, VOCABULARY, (2, 4), generator=generator)
        shift = torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float64)
        tokens, shift = tokens.to(self._device), shift.to(self._device)
        output = model(tokens, shift.requires_grad_(self._input_grad))
        return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def _contexts(scenario: Scenario, step: int) -> Sequence[int]:
    """Returns the numbers of the contexts of one step, the second of which adds to the gradients."""
    return range(2 * step, 2 * step + 2) if "batches" in scenario else [step]


def _backwards(scenario: Scenario, context: int) -> Iterator[tuple[int, str]]:
    """Yields `(number of the batch, letter of accumulating)` of one context."""
    for index, letter in enumerate(scenario["accumulation"]):
        yield 100 * context + index, letter


def _weights(scenario: Scenario, context: int, size: int) -> list[list[float]]:
    """Returns how much the batches of a context weigh, by index and rank; 0 for those that a rank lacks."""
    count, differ = len(scenario["accumulation"]), scenario.get("batches") == "weighted"
    if "batches" not in scenario:
        return [[1.0] * size] * count
    ranks = [*range(size)][:: (-1) ** context]  # the first has all
    return [
        [(1.0 + (2 * rank + index) * differ) * (index < count - ranks.index(rank)) for rank in range(size)]
        for index in range(count)
    ]


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def _break_once(scenario: Scenario, model: nn.Module, batches: _Batches, rank: int) -> None:
    """Runs one forward and backward in which a module raises on every rank, if a gradient reaches it."""

    def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(_fail)

    norm = model.blocks[1].norm
    hook = norm.register_forward_hook(_fail if scenario["fault"] == "forward" else fail_in_backward)
    try:
        batches.loss(model, rank, 77, 1).backward()
    except ArithmeticError:
        pass
    else:
        if scenario.get("ended_by_hand"):
            model.finalize_backward()
    finally:
        hook.remove()


@dataclass(frozen=True)
class Reference:
    """Training of a plain model that sees the batches of all ranks: what came of it, by batch and by rank."""

    initial: Model
    losses: dict[int, list[torch.Tensor]]
    final: dict[str, torch.Tensor]
    steps: int
    """At least two, as some options begin in the second."""


def reference(
    scenario: Scenario, world_size: int, device: torch.device | None = None, steps: int = STEPS
) -> Reference:
    """Trains a plain model as the scenario says; ranks that are threads may share what comes of it."""
    torch.manual_seed(0)
    plain = Model(scenario).double().to(device or "cpu")
    initial, losses = copy.deepcopy(plain), {}
    batches, optimizer = _Batches(scenario, device), _optimizer(scenario, plain)
    for step in range(steps):
        if step == 1 and scenario["unfreeze"]:
            plain.requires_grad_(True)
        optimizer.zero_grad(scenario["zeroing"] == "to_none")
        for context in _contexts(scenario, step):
            every = _weights(scenario, context, world_size)
            whole = sum(map(sum, every)) if "batches" in scenario else world_size
            for (number, _), weights in zip(_backwards(scenario, context), every):
                forwards = scenario["forwards"]
                of_ranks = [batches.loss(plain, rank, number, forwards) for rank in range(world_size)]
                (sum(loss * weight for loss, weight in zip(of_ranks, weights)) / whole).backward()
                losses[number] = [loss.detach() for loss in of_ranks]
        optimizer.step()
    return Reference(initial, losses, plain.state_dict(), steps)


def _optimizer(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    # A FlatParameter gives its unused parts zero gradients, a plain module none: SGD alone is alike.
    alike = scenario.get("use_orig_params", True)
    extras: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1} if alike else {}
    return torch.optim.SGD(model.parameters(), lr=0.05, **extras)


def check(
    scenario: Scenario,
    rank: int,
    world_size: int,
    expected: Reference | None = None,
    aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    device: torch.device | None = None,
) -> nn.Module:
    """Trains as the scenario says, compares with the plain model, and returns the trained model.

    Comparisons run in the context `aside`; the plain model's training is done here unless it is known.
    """
    expected = expected or reference(scenario, world_size, device)
    with aside():
        made = _unsharded(expected.initial, scenario, rank)
    model = _shard(made, scenario) if "front" in scenario else _wrapped(made, scenario, expected.initial)
    batches = _Batches(scenario, device)
    optimizer = _optimizer(scenario, model)
    for step in range(expected.steps):
        if step == 1 and scenario["unfreeze"]:
            model.requires_grad_(True)
        optimizer.zero_grad(scenario["zeroing"] == "to_none")
        if step == 1 and scenario["fault"]:
            _break_once(scenario, model, batches, rank)
            optimizer.zero_grad(scenario["zeroing"] == "to_none")
        for number, loss in _step(scenario, step, model, batches, rank):
            with aside():
                wanted = expected.losses[number][rank]
                torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10, msg=f"loss: {scenario}")
        optimizer.step()
    state = model.state_dict()
    with aside():
        for name, value in state.items():
            wanted = expected.final[name]
            full_value = full(value.to(wanted.device))
            torch.testing.assert_close(full_value, wanted, rtol=1e-10, atol=1e-10, msg=f"{name}: {scenario}")
    return model


def _step(
    scenario: Scenario, step: int, model: nn.Module, batches: _Batches, rank: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Does the backwards of one step; yields the number of each batch, and its loss."""
    for context in _contexts(scenario, step):
        with fsdp_wrap.uneven(model) if "batches" in scenario else nullcontext() as work:
            weights = _weights(scenario, context, dist.get_world_size())
            for (number, letter), of_ranks in zip(_backwards(scenario, context), weights):
                backward = torch.Tensor.backward
                if work is not None:
                    weight = of_ranks[rank] if scenario["batches"] == "weighted" else None
                    backward = partial(work.backward, weight=weight)
                if of_ranks[rank]:
                    run = partial(batches.loss, model, rank, number)
                    yield number, _backward(scenario, letter, model, run, backward)


def _backward(
    scenario: Scenario,
    letter: str,
    model: nn.Module,
    run: Callable[[int], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Runs forwards and their backward; returns the loss."""
    if scenario["evaluates"]:
        with torch.no_grad():
            model.eval()
            run(1)
            model.train()
    with accumulating(model, letter):
        loss = run(scenario["forwards"])
        backward(loss)
    if letter == "F" and scenario.get("ended_by_hand"):
        model.finalize_backward()
    return loss.detach()
