"""One program in which capabilities meet: it trains, compares, saves, loads elsewhere, and goes on.

A `Capability` changes the program at the points that have its methods' names. Next to the sharded model, a
plain one in float64 does the same with the rows of all ranks, and what it has is what must be found.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import scenario
from fronts import FRONTS, accumulating, full, translated
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.distributed_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from models import gather_objects
from optim_states import by_name
from scenario import VOCABULARY, WIDTH

ROWS, LENGTH = 4, 3
FIRST, SECOND = range(3), range(4, 6)
"""The steps before saving, and those after loading."""
SPEC = {"checkpointing": "none", "tied": "nothing", "frozen": "nothing"}
FULL = StateDictOptions(full_state_dict=True)

Value = Any


class Net(scenario.Model):
    reads: str | None = None
    """The module whose weight the last product takes by itself, in place of the head's forward."""
    checkpoints_blocks = False
    skips = False
    """Whether the second block is left out."""

    def __init__(self, spec: dict[str, str]) -> None:
        super().__init__(spec)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + shift
        for number, block in enumerate(self.blocks):
            if number == 1 and self.skips:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints_blocks else block(x)
        x = self.norm(x)
        if self.reads is None:
            return self.head(x)
        weight, bias = self.get_submodule(self.reads).weight, getattr(self.head, "bias", None)
        # What is not unsharded is gathered in its master dtype.
        return nn.functional.linear(x, full(weight).to(x), None if bias is None else full(bias).to(x))


class World:
    """The ranks that train one model: all of them, or each of some parts by itself.

    Tensor parallelism cuts over some of them, and there may be several copies of each shard.
    """

    def __init__(self, parts: int = 1, tensor: int = 1, replicas: int = 1) -> None:
        self.size = dist.get_world_size() // parts
        self.parts, self.replicas = parts, replicas
        self.copies = self.size // tensor
        shape = (parts, replicas, self.copies // replicas, tensor)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("parts", "replicate", "shard", "tensor"))
        own = dist.get_rank() % self.size // tensor
        self.rows = slice(own * ROWS // self.copies, (own + 1) * ROWS // self.copies)
        self.group = dist.group.WORLD
        if parts > 1:
            groups = [[*range(part * self.size, (part + 1) * self.size)] for part in range(parts)]
            self.group, _ = dist.new_subgroups_by_enumeration(groups)

    @property
    def data(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"] if self.replicas > 1 else self.mesh["shard"]


@dataclass
class Side:
    """A model in training: a sharded one, or the plain one, which has no world. Capabilities keep notes."""

    model: Any
    world: World | None = None
    front: str | None = None
    optimizer: Any = None
    make_optimizer: Any = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def net(self) -> Any:
        return self.model.module if isinstance(self.model, FSDP) else self.model

    @property
    def rows(self) -> slice:
        return slice(0, ROWS) if self.world is None else self.world.rows


class Capability:
    """One capability of the package, and what a program does that has it.

    Its attributes and methods are given by name, or are those of a subclass. What is left out is as in a
    program without the capability.

    Attributes:
        name: By which draws name it.
        slots: Two capabilities that share one do not meet.
        fronts: The front-ends that have it.
        sizes: Numbers of ranks.
        tolerance: Of the comparisons with the plain model.
        elsewhere: Whether the program may go on at another number of ranks.
        needs: A package.
        spec: Of the model, as `scenario.Model` takes it.
        letters: The backwards of a step, as `fronts.accumulating` takes them.
        refused: With which capability or front-end the program is refused, and what the error says.
        given: Options of the front-end, as `fronts.shard` takes them.
        mesh: Of the `World`.
    """

    name = ""
    slots: Sequence[str] = ()
    fronts: Sequence[str] = FRONTS
    sizes: Sequence[int] = (2, 4)
    tolerance: float = 1e-9
    elsewhere: bool = True
    needs: str | None = None
    spec: Mapping[str, str] = {}
    letters: str | None = None
    refused: Mapping[str, str] = {}
    given: Mapping[str, Any] = {}
    mesh: Mapping[str, int] = {}

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            assert hasattr(self, name), f"a capability has no '{name}'"
            setattr(self, name, value)

    def refusal(self, names: Collection[str]) -> str | None:
        """Returns what the error says if the program is refused that has these capabilities and front-end."""
        return next((told for name, told in self.refused.items() if name in names), None)

    def build(self, net: Net) -> None:
        """Changes the plain model, of which the sharded one is a copy."""

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        """Returns which modules become units before the root does."""
        return units

    def options(self, front: str, world: World) -> Mapping[str, Any]:
        """Returns the options of the front-end."""
        return self.given

    def before_sharding(self, net: Net, world: World) -> None:
        """Changes the model before it is sharded."""

    def makes_unit(self, unit: Any, options: dict[str, Any]) -> bool:
        """Makes a unit in its own way; False for the usual one."""
        return False

    def sharded(self, side: Side) -> None:
        """Changes the sharded model."""

    def optimizer(self, side: Side) -> torch.optim.Optimizer | None:
        """Makes the optimizer; None for the default."""
        return None

    def begin(self, side: Side) -> None:
        """Is called once the optimizer was made, on both sides."""

    def before_step(self, side: Side, at: int) -> None:
        """Is called before a step."""

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns what to go backward from."""
        return loss

    def after_backward(self, side: Side) -> None:
        """Is called after the last backward of a step."""

    def update(self, side: Side) -> bool:
        """Updates parameters; False for the default."""
        return False

    def after_step(self, side: Side, at: int) -> None:
        """Is called after a step."""

    def move(self, program: Program, first: Side, second: Side) -> bool:
        """Brings model and optimizer over; False for the default."""
        return False

    def goes_on(self, first: Side, second: Side) -> None:
        """Brings over what the capability keeps by itself."""


@dataclass
class Program:
    """A program with some capabilities, in the order of their points, and an empty folder of all ranks."""

    front: str
    capabilities: Sequence[Capability]
    folder: Path
    _sides: list[Side] = field(default_factory=list)

    def run(self) -> None:
        """Trains, compares, saves, loads, goes on; or is refused by name, and nothing has changed."""
        told = self._refusal()
        if told is None:
            self._run()
            return
        with pytest.raises(BaseException, match=told):
            self._run()
        for side in self._sides:
            state = get_model_state_dict(side.model, options=FULL)
            self.assert_tree(state, side.notes["before"], "model state after a refusal")

    def _refusal(self) -> str | None:
        names = [self.front, *(capability.name for capability in self.capabilities)]
        told = (capability.refusal(names) for capability in self.capabilities)
        return next((refusal for refusal in told if refusal is not None), None)

    def _run(self) -> None:
        plain, first = self.begun(None), self.begun(self.world(1))
        self.train_alike(plain, first, FIRST)
        self.assert_same_states(plain, first, "sharded")
        second = self.begun(self.world(2 if self._elsewhere() else 1), other=True)
        self._sides = [first, second]
        if self._refusal():
            for side in self._sides:
                side.notes["before"] = copy.deepcopy(get_model_state_dict(side.model, options=FULL))
        if not any(capability.move(self, first, second) for capability in self.capabilities):
            move_full(first, second)
        for capability in self.capabilities:
            capability.goes_on(first, second)
        self.train_alike(plain, second, SECOND)
        self.assert_same_states(plain, second, "full")

    def world(self, parts: int) -> World:
        options = {key: value for capability in self.capabilities for key, value in capability.mesh.items()}
        return World(parts, **options)

    def _elsewhere(self) -> bool:
        return all(capability.elsewhere for capability in self.capabilities)

    def begun(self, world: World | None, other: bool = False) -> Side:
        """A model before its first step; with other values if it will be loaded."""
        torch.manual_seed(1 if other else 0)
        net = Net(
            {**SPEC, **{k: v for capability in self.capabilities for k, v in capability.spec.items()}}
        ).double()
        for capability in self.capabilities:
            capability.build(net)
        side = Side(net)
        if world is not None:
            side = Side(self._sharded(net, world), world, self.front)
            for capability in self.capabilities:
                capability.sharded(side)
        side.make_optimizer = self._made_optimizer
        side.optimizer = self._made_optimizer(side)
        for capability in self.capabilities:
            capability.begin(side)
        return side

    def _made_optimizer(self, side: Side) -> torch.optim.Optimizer:
        made = (capability.optimizer(side) for capability in self.capabilities)
        return next((optimizer for optimizer in made if optimizer is not None), None) or adamw(side.model)

    def _sharded(self, net: Net, world: World) -> nn.Module:
        for capability in self.capabilities:
            capability.before_sharding(net, world)
        units, options = [*net.blocks], dict[str, Any]()
        for capability in self.capabilities:
            units, options = (
                capability.units(net, units),
                {**options, **capability.options(self.front, world)},
            )
        if self.front == "composable":
            options = translated({"device_mesh": world.data, **options})
            for unit in units:
                if not any(capability.makes_unit(unit, options) for capability in self.capabilities):
                    fully_shard(unit, **options)
            return fully_shard(net, **options)
        if not {"process_group", "device_mesh"} & options.keys():
            options["process_group"] = world.group
        own = {id(unit) for unit in units}
        return FSDP(
            net,
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or id(module) in own,
            use_orig_params=self.front == "orig",
            **options,
        )

    def train_alike(self, plain: Side, sharded: Side, steps: Iterable[int]) -> None:
        """Takes steps on both sides, and looks before every second whether they evaluate alike."""
        for at in steps:
            if at % 2 == 0:
                with torch.no_grad():
                    output, expected = (side.model(*batch(side, 100 * at)) for side in (sharded, plain))
                self.assert_close(output, expected[sharded.rows], f"output before step {at}")
            for side in (plain, sharded):
                self.step(side, at)

    def step(self, side: Side, at: int) -> None:
        side.optimizer.zero_grad()
        for capability in self.capabilities:
            capability.before_step(side, at)
        letters = next((capability.letters for capability in self.capabilities if capability.letters), "F")
        for number, letter in enumerate(letters):
            with accumulating(side.model, letter if side.world else "F"):
                self._backward(side, 100 * at + number)
        for capability in self.capabilities:
            capability.after_backward(side)
        if not any(capability.update(side) for capability in self.capabilities):
            side.optimizer.step()
        for capability in self.capabilities:
            capability.after_step(side, at)

    def _backward(self, side: Side, number: int) -> None:
        inputs = batch(side, number)
        loss = nn.functional.cross_entropy(side.model(*inputs).flatten(0, 1), inputs[0].flatten())
        for capability in self.capabilities:
            loss = capability.loss(side, loss, inputs)
        loss.backward()

    def assert_same_states(self, plain: Side, sharded: Side, kind: str) -> None:
        """Full or sharded states of model and optimizer are the plain one's."""
        options = StateDictOptions(full_state_dict=kind == "full")
        state = get_model_state_dict(sharded.model, options=options)
        self.assert_tree(whole(state), plain.model.state_dict(), f"{kind} model state")
        optim: Any = get_optimizer_state_dict(sharded.model, sharded.optimizer, options=options)
        expected = by_name(plain.optimizer, plain.model)
        self.assert_tree(whole(optim["state"]), expected["state"], f"{kind} optimizer state")
        self.assert_tree(groups_of(optim), groups_of(expected), f"{kind} optimizer groups")

    def assert_tree(self, actual: Value, expected: Value, what: str) -> None:
        if isinstance(expected, Mapping):
            assert {*actual} == {*expected}, f"{what}: {[*actual]} in place of {[*expected]}"
            for key, value in expected.items():
                self.assert_tree(actual[key], value, f"{what} '{key}'")
        elif isinstance(expected, torch.Tensor):
            self.assert_close(torch.as_tensor(actual), expected, what)
        else:
            assert actual == expected, f"{what}: {actual} in place of {expected}"

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        tolerance = max((capability.tolerance for capability in self.capabilities), default=1e-9)
        close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
        close(actual.detach().to(expected.dtype), expected, msg=lambda told: f"{what}: {told}")


def batch(side: Side, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    shift = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return tokens[side.rows], shift[side.rows].requires_grad_(side.notes.get("input_grad", False))


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    """The default; a large `eps` keeps it from enlarging what is rounded."""
    params = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.AdamW(params, **{"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1, **options})


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with full tensors, gathered one after the other, if all ranks have the same names."""
    told = [(name, [*value] if isinstance(value, Mapping) else None) for name, value in state.items()]
    others = [names for names in gather_objects(told) if names != told]
    assert not others, f"ranks have other names, or in another order: {told} and {others[0]}"
    return tree_map(
        lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value, dict(state)
    )


def groups_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of a parameter's group, by its name; torch makes lists of tuples."""
    return {
        name: {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in state["param_groups"]
        for name in group["params"]
    }


def move_full(first: Side, second: Side, model: bool = True) -> None:
    if model:
        set_model_state_dict(second.model, get_model_state_dict(first.model, options=FULL), options=FULL)
    state = get_optimizer_state_dict(first.model, first.optimizer, options=FULL)
    set_optimizer_state_dict(second.model, second.optimizer, copy.deepcopy(state), options=FULL)
