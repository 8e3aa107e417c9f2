"""`Recipe`: the decisions that `tune` makes for a training step, and how a model gets them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_wrap._core import WRAPPED_ATTR, clean_fqn, format_bytes, format_seconds, own_output, walk
from fsdp_wrap._params import Layout
from fsdp_wrap._runtime import Unit, require_idle, schedule_of, units_in
from fsdp_wrap.fully_shard import fully_shard
from fsdp_wrap.tools.fitting.variants import OFFLOADS, allocate, check_word, mesh_of, modules_of

PARAMETERS = FREED, TO_BACKWARD, ALWAYS = "freed", "kept to backward", "kept"
ACTIVATIONS = STAY, RECOMPUTED, ON_HOST, INPUTS_ON_HOST = (
    "stay",
    "recomputed",
    "on host",
    "recomputed, inputs on host",
)
ON_DEVICE = "on device"
OFFLOADS_ACTIVATIONS, SHARDS_STATE = (
    find_spec(f"fsdp_wrap.{folder}") is not None for folder in ("_activations", "_state_over_replicas")
)
"""Whether the add-ons are there that move activations to the host, and shard state over replicas."""


@dataclass(frozen=True)
class UnitRecipe:
    """The decisions for one unit.

    Attributes:
        modules: Names of the modules that are the unit; `("",)` for the root.
        parameters: Its full parameters are "freed" after forward and backward, "kept to backward", or "kept".
        activations: Tensors that its forward saves for backward "stay" on the device, are "recomputed" from
            the inputs of its blocks, are "on host" meanwhile, or "recomputed, inputs on host".
        shards: Its shards, with their gradients and optimizer state, lie "on device" or "on host".
    """

    modules: tuple[str, ...]
    parameters: str = FREED
    activations: str = STAY
    shards: str = ON_DEVICE

    def __post_init__(self) -> None:
        """Checks the words.

        Raises:
            ValueError: If one is unknown, or there is no module.
        """
        check_word("parameters", self.parameters, PARAMETERS)
        check_word("activations", self.activations, ACTIVATIONS)
        check_word("shards", self.shards, (ON_DEVICE, ON_HOST))
        if not self.modules:
            raise ValueError("modules must name a module of the unit at least; the root's name is ''")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a training step is sharded, what is kept, computed again or moved: the answer of `tune`.

    A recipe that was not tuned has no `units` yet: each block becomes one, or `together` of them.

    Attributes:
        units: The units in the order in which they run.
        together: How many neighbouring blocks make a unit where there are no `units` yet; 0 for one unit in
            all.
        prefetch: How many units ahead all-gathers are issued; 0 for the runtime's default.
        batch_bytes: Memory for collectives that small units share; None for the device's default.
        ranks_per_replica: How many ranks hold a copy of the model between them; None for all.
        state_over_replicas: Whether replicas shard the optimizer's state between them as well.
        offload: Kept in host memory between steps: "none", the "optimizer"'s state, or "all"; of units whose
            shards are on the host, all.
        ranks: The ranks that it was tuned for; None if it was not.
        memory: The budget in bytes of each rank.
        needed_bytes: The most bytes that a rank holds, by the plan.
        predicted_seconds: Seconds of a step, by the plan.
        notes: Lines of the page: what decisions cost and gain, what else was tried.
    """

    units: tuple[UnitRecipe, ...] = ()
    together: int = 1
    prefetch: int = 0
    batch_bytes: int | None = None
    ranks_per_replica: int | None = None
    state_over_replicas: bool = False
    offload: str = "none"
    ranks: int | None = None
    memory: int | None = None
    needed_bytes: int | None = None
    predicted_seconds: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the decisions.

        Raises:
            ValueError: If one is out of range, or a module is in two units.
        """
        check_word("offload", self.offload, OFFLOADS)
        for name in ("together", "prefetch"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} counts units: pass 0 or a positive int, not {number!r}")
        times = Counter(name for unit in self.units for name in unit.modules)
        if twice := [name for name, count in times.items() if count > 1]:
            raise ValueError(f"the module '{twice[0]}' is in two units of the recipe: name it once")
        if self.state_over_replicas and self.ranks_per_replica is None:
            raise ValueError("state_over_replicas=True shards state over replicas: pass ranks_per_replica")

    def apply(
        self,
        model: nn.Module,
        blocks: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        **options: Any,
    ) -> nn.Module:
        """Gives a model these decisions. Make the optimizer afterwards.

        A plain model is sharded by `fully_shard`; parameters on the meta device get memory, and have to be
        initialised or loaded afterwards. A model that is sharded or wrapped keeps its units, precision and
        offload: it gets the decisions for parameters, activations, prefetch and batches.

        Args:
            model: The model.
            blocks: The classes of its blocks, or their names; None for modules of equal classes in a list.
            options: Further arguments of `fully_shard` for a plain model, such as `mesh` and `mp_policy`.

        Returns:
            The model itself.

        Raises:
            ValueError: If a module of the recipe is not in the model, or no unit of a sharded model, the
                model is sharded and the recipe needs to shard it otherwise, or `mesh` is given and the recipe
                has replicas.
            TypeError: If options are given for a sharded model, or decide what the recipe decides.
            RuntimeError: Inside a forward or backward.
        """
        found = _blocks_of(model, blocks)
        if units_in(model):
            self._check_fits(model, options)
        else:
            self._shard(model, found, options)
        self._settle(model, found)
        return model

    def _shard(self, model: nn.Module, blocks: dict[str, nn.Module], options: dict[str, Any]) -> None:
        """Makes units of a plain model."""
        for name in (
            "reshard_after_forward",
            "offload_policy",
            "travel_together_bytes",
            "state_over_replicas",
        ):
            if name in options:
                raise TypeError(f"the recipe decides {name}: leave it out")
        mesh = options.pop("mesh", None)
        if mesh is not None and self.ranks_per_replica is not None:
            raise ValueError("mesh is given, and the recipe has replicas: let it make the mesh")
        if mesh is None:
            mesh = mesh_of(self.ranks_per_replica, "Recipe.apply()")
        options |= {"mesh": mesh, "state_over_replicas": self.state_over_replicas}
        on_host = {unit.modules[0] for unit in self.units if unit.shards == ON_HOST}
        policy, policy_on_host = OFFLOADS[self.offload][0], OFFLOADS["all"][0]
        modules = dict(model.named_modules())
        for names in self._borders([*blocks]):
            if missing := [name for name in names if name not in modules]:
                raise ValueError(f"the recipe has a unit '{missing[0]}', and {type(model).__name__} has not")
            members = [modules[name] for name in names]
            options["offload_policy"] = policy_on_host if names[0] in on_host else policy
            fully_shard(members if len(members) > 1 else members[0], **options)
        options["offload_policy"] = policy_on_host if "" in on_host else policy
        fully_shard(model, **options)
        allocate(model, mesh)

    def _borders(self, blocks: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yields the modules of each unit below the root."""
        if self.units:
            yield from (unit.modules for unit in self.units if unit.modules != ("",))
        elif self.together:
            yield from (blocks[at : at + self.together] for at in range(0, len(blocks), self.together))

    def _check_fits(self, model: nn.Module, options: dict[str, Any]) -> None:
        """Checks that a sharded model has the recipe's units."""
        if options:
            raise TypeError(f"{type(model).__name__} is sharded already: {[*options]} have no effect")
        there = units_in(model)
        for unit in self.units:
            if unit.modules[0] not in there or len({there.get(name) for name in unit.modules}) > 1:
                raise ValueError(
                    f"'{', '.join(unit.modules)}' is no unit of this {type(model).__name__}, which has "
                    f"{[*there]}: apply the recipe to the plain model"
                )
            made = there[unit.modules[0]]
            if unit.shards == ON_HOST and not all(map(_may_lie_on_host, made.layouts)):
                raise ValueError(
                    f"the recipe has the shards of '{unit.modules[0]}' on the host, and this "
                    f"{type(model).__name__} is sharded already with those on the device: pass "
                    "offload_policy=CPUOffloadPolicy() or cpu_offload=CPUOffload(True) where that is sharded"
                )
        if self.offload != "none" or self.ranks_per_replica is not None:
            raise ValueError(
                f"this {type(model).__name__} is sharded already, and the recipe offloads or replicates: "
                "apply it to the plain model, before any other sharding"
            )

    def _settle(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        """Sets the units' options, and what becomes of activations."""
        there = units_in(model)
        require_idle([*there.values()], "Recipe.apply()")
        inner = [name for name in there if name]
        on_host = [unit.modules[0] for unit in self.units if unit.activations in (ON_HOST, INPUTS_ON_HOST)]
        for unit in self.units:
            made = there[unit.modules[0]]
            made.set_reshard_after_forward(unit.parameters == FREED)
            made.set(reshards_after_backward=unit.parameters != ALWAYS)
            parts = [*made.parts] or [made.module]
            if unit.modules == ("",):  # a recomputation of the whole would save nothing
                parts = [block for name, block in blocks.items() if name not in inner]
            for part in parts:
                _recompute(part, unit.activations in (RECOMPUTED, INPUTS_ON_HOST))
        if self.prefetch and self.units:
            _prefetch([there[unit.modules[0]] for unit in self.units], self.prefetch)
        if self.batch_bytes is not None:
            for root in {schedule_of(unit).root for unit in there.values()}:
                root.set(travel_together_bytes=self.batch_bytes)
        if on_host:
            from fsdp_wrap._activations import offload_activations  # an add-on, which may be left out

            offload_activations(model, on_host)

    # text

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the recipe as JSON, and writes it to a file if one is named.

        Args:
            path: The file to write; None for none.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1)
        if path is not None:
            own_output(Path(path)).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Makes a recipe of the text that `to_json` returned.

        Args:
            text: The JSON.

        Raises:
            ValueError: If it is another text.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            units = [{**unit, "modules": tuple(unit["modules"])} for unit in plain["units"]]
            made = tuple(UnitRecipe(**unit) for unit in units)
            return cls(**{**plain, "units": made, "notes": tuple(plain["notes"])})
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not what Recipe.to_json() writes: {error}") from error

    def __str__(self) -> str:
        """The page that a person reads."""
        return "\n".join([*self._head(), "", *self._decisions(), *(f"\n{note}" for note in self.notes)])

    def _head(self) -> Iterator[str]:
        if self.needed_bytes is None or self.memory is None:
            yield "A recipe that was not tuned"
            return
        yield f"A step of {format_seconds(self.predicted_seconds)} by the plan, on {self.ranks} ranks"
        yield f"{format_bytes(self.needed_bytes)} of {format_bytes(self.memory)} are needed"

    def _decisions(self) -> Iterator[str]:
        yield f"ranks of a replica  {self.ranks_per_replica or 'all'}"
        if self.state_over_replicas:
            yield "optimizer state     sharded over the replicas"
        yield f"kept on the host    {self.offload}"
        yield f"prefetch            {self.prefetch or 'default'}"
        yield f"batched bytes       {'default' if self.batch_bytes is None else self.batch_bytes}"
        if not self.units:
            yield f"blocks in a unit    {self.together or 'all'}"
        for title in ("parameters", "activations", "shards"):
            words = [getattr(unit, title) for unit in self.units]
            for word in dict.fromkeys(words):
                names = [unit.modules for unit, its in zip(self.units, words) if its == word]
                if word != ON_DEVICE:
                    yield f"{title:<12}{word:<28}{format_names(names)}"


def format_names(units: Sequence[tuple[str, ...]]) -> str:
    """Names units: neighbours with numbers as a range, those of several modules by a plus."""
    runs: list[list[str]] = []
    for name in (name for unit in units for name in unit):
        before = runs[-1][-1] if runs else None
        if before is not None and _successor(before) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = [
        (run[0] or "(root)") if len(run) == 1 else f"{run[0]} .. {run[-1].rpartition('.')[2]}" for run in runs
    ]
    count = f" ({len(units)} units)" if len(units) > 1 else ""
    return f"{', '.join(parts)}{count}"


def _successor(name: str) -> str | None:
    head, dot, last = name.rpartition(".")
    return f"{head}{dot}{int(last) + 1}" if last.isdecimal() else None


def _blocks_of(model: nn.Module, blocks: Any) -> dict[str, nn.Module]:
    """Returns the blocks by name: modules of the classes, or of equal classes beside each other in a list."""
    named = {clean_fqn(name): module for name, module in walk(model)}
    if blocks is not None:
        found = {*modules_of(model, (blocks,) if isinstance(blocks, (type, str)) else tuple(blocks))}
        return {name: module for name, module in named.items() if module in found}
    chosen: dict[str, nn.Module] = {}
    for name, module in named.items():
        inside = any(f"{name}.".startswith(f"{block}.") for block in chosen)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        owners = [child for child in module.children() if next(child.parameters(), None) is not None]
        kinds = Counter(map(type, owners))
        chosen |= {
            f"{name}.{key}".lstrip("."): child
            for key, child in module.named_children()
            if kinds[type(child)] > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        }
    return chosen


def _may_lie_on_host(layout: Layout) -> bool:
    """Whether a layout's shards are offloaded, or lie in the host's memory anyway."""
    return layout.offloaded or all(param.device.type == "cpu" for param in layout.sharded_params)


class _Recomputed(partial[Any]):
    """A module's forward whose activations are computed again in backward."""


def _recompute(module: nn.Module, wanted: bool) -> None:
    """Lets a module's forward keep its inputs alone, or all that it saves."""
    inner = module._modules.get(WRAPPED_ATTR) or module
    is_so = isinstance(inner.__dict__.get("forward"), _Recomputed)
    if wanted and not is_so:
        setattr(inner, "forward", _Recomputed(checkpoint, inner.forward, use_reentrant=False))  # noqa: B010
    elif is_so and not wanted:
        before: Callable[..., Any] = inner.__dict__.pop("forward").args[0]
        if getattr(before, "__func__", None) is not type(inner).forward:
            setattr(inner, "forward", before)  # noqa: B010


def _prefetch(units: Sequence[Unit], ahead: int) -> None:
    """Lets each unit gather some of its successors in forward, and of its predecessors in backward."""
    for at, unit in enumerate(units):
        unit.set(
            forward_targets=tuple(units[at + 1 : at + 1 + ahead]),
            backward_targets=tuple(reversed(units[max(at - ahead, 0) : at])),
        )
