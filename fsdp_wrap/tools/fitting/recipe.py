"""`Recipe`: the decisions that `fit` makes for a training step, and how a model gets them."""

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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import default_mesh
from fsdp_wrap._core import WRAPPED_ATTR, clean_fqn, own_output, walk
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap.api import CPUOffloadPolicy, OffloadPolicy
from fsdp_wrap.fully_shard import fully_shard

PARAMETERS = FREED, TO_BACKWARD, ALWAYS = "freed", "kept to backward", "kept"
ACTIVATIONS = STAY, RECOMPUTED, ON_HOST, INPUTS_ON_HOST = (
    "stay",
    "recomputed",
    "on host",
    "recomputed, inputs on host",
)
OFFLOADS = {
    "none": OffloadPolicy(),
    "optimizer": CPUOffloadPolicy(offload_params=False, offload_optimizer_state=True),
    "all": CPUOffloadPolicy(),
}
"""What is kept in host memory between steps, as `fully_shard` takes it."""

OFFLOADS_ACTIVATIONS = find_spec("fsdp_wrap._activations") is not None
"""Whether the add-on is there that moves activations to the host."""


@dataclass(frozen=True)
class UnitRecipe:
    """The decisions for one unit.

    Attributes:
        modules: Names of the modules that are the unit; `("",)` for the root.
        parameters: Its full parameters are "freed" after forward and backward, "kept to backward", or "kept".
        activations: Tensors that its forward saves for backward "stay" on the device, are "recomputed" from
            the inputs of its blocks, are "on host" meanwhile, or "recomputed, inputs on host".
    """

    modules: tuple[str, ...]
    parameters: str = FREED
    activations: str = STAY

    def __post_init__(self) -> None:
        """Checks the words.

        Raises:
            ValueError: If one is unknown, or there is no module.
        """
        _check_word("parameters", self.parameters, PARAMETERS)
        _check_word("activations", self.activations, ACTIVATIONS)
        if not self.modules:
            raise ValueError("modules must name a module of the unit at least; the root's name is ''")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a training step is sharded, what is kept, computed again or moved: a part of the answer of `fit`.

    Attributes:
        units: The units in the order in which they run; empty to make units of all blocks alike.
        together: How many neighbouring blocks make a unit where there are no `units`; 0 for one unit in all.
        prefetch: How many units ahead all-gathers are issued; 0 for the runtime's default.
        ranks_per_replica: How many ranks hold a copy of the model between them; None for all.
        offload: Kept in host memory between steps: "none", the "optimizer"'s state, or "all".
    """

    units: tuple[UnitRecipe, ...] = ()
    together: int = 1
    prefetch: int = 0
    ranks_per_replica: int | None = None
    offload: str = "none"

    def __post_init__(self) -> None:
        """Checks the decisions.

        Raises:
            ValueError: If one is out of range, or a module is in two units.
        """
        _check_word("offload", self.offload, OFFLOADS)
        for name in ("together", "prefetch"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} counts units: pass 0 or a positive int, not {number!r}")
        times = Counter(name for unit in self.units for name in unit.modules)
        if twice := [name for name, count in times.items() if count > 1]:
            raise ValueError(f"the module '{twice[0]}' is in two units of the recipe: name it once")

    def apply(
        self,
        model: nn.Module,
        blocks: type[nn.Module] | str | Iterable[type[nn.Module] | str] | None = None,
        **options: Any,
    ) -> nn.Module:
        """Gives a model these decisions. Make the optimizer afterwards.

        A plain model is sharded by `fully_shard`; parameters on the meta device get memory, and have to be
        initialised or loaded afterwards. A model that is sharded or wrapped keeps its units, precision and
        offload: it gets the decisions for parameters, activations and prefetch.

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
        by_name = _blocks_of(model, blocks)
        if units_in(model):
            self._check_fits(model, options)
        else:
            self._shard(model, by_name, options)
        self._settle(model, by_name)
        return model

    def _shard(self, model: nn.Module, blocks: dict[str, nn.Module], options: dict[str, Any]) -> None:
        """Makes units of a plain model."""
        for name in ("reshard_after_forward", "offload_policy"):
            if name in options:
                raise TypeError(f"the recipe decides {name}: leave it out")
        mesh = options.pop("mesh", None)
        if mesh is not None and self.ranks_per_replica is not None:
            raise ValueError("mesh is given, and the recipe has replicas: let it make the mesh")
        if mesh is None:
            mesh = _mesh_of(self.ranks_per_replica)
        options |= {"mesh": mesh, "offload_policy": OFFLOADS[self.offload]}
        modules = dict(model.named_modules())
        for names in self._borders([*blocks]):
            if missing := [name for name in names if name not in modules]:
                raise ValueError(f"the recipe has a unit '{missing[0]}', and {type(model).__name__} has not")
            members = [modules[name] for name in names]
            fully_shard(members if len(members) > 1 else members[0], **options)
        fully_shard(model, **options)
        _allocate(model, mesh)

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
            return cls(**{**plain, "units": tuple(UnitRecipe(**unit) for unit in units)})
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not what Recipe.to_json() writes: {error}") from error

    def __str__(self) -> str:
        """Names the decisions that differ from the defaults of `fully_shard`, in one line."""
        parts = [] if self.offload == "none" else [f"{self.offload} offloaded"]
        if self.ranks_per_replica is not None:
            parts.append(f"replicas of {self.ranks_per_replica} ranks")
        if self.together != 1:
            parts.append(f"{self.together} blocks in a unit" if self.together else "one unit")
        for field in ("parameters", "activations"):
            for word in dict.fromkeys(getattr(unit, field) for unit in self.units):
                if word not in (FREED, STAY):
                    names = [
                        name for unit in self.units if getattr(unit, field) == word for name in unit.modules
                    ]
                    parts.append(f"{_format_names(names)} {word}")
        return "; ".join(parts) or "all freed"


def _format_names(names: Sequence[str]) -> str:
    """Returns names in a list, neighbours with numbers as a range."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _successor(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(
        f"{run[0]} .. {run[-1].rpartition('.')[2]}" if len(run) > 1 else run[0] or "the root" for run in runs
    )


def _successor(name: str) -> str | None:
    head, dot, last = name.rpartition(".")
    return f"{head}{dot}{int(last) + 1}" if last.isdecimal() else None


def _blocks_of(model: nn.Module, blocks: Any) -> dict[str, nn.Module]:
    """Returns the blocks by name: modules of the classes, or of equal classes beside each other in a list."""
    named = {clean_fqn(name): module for name, module in walk(model)}
    if blocks is not None:
        return _modules_of(named, (blocks,) if isinstance(blocks, (type, str)) else tuple(blocks))
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


def _modules_of(named: dict[str, nn.Module], blocks: tuple[Any, ...]) -> dict[str, nn.Module]:
    """Returns the modules of some classes, or of classes of some names."""
    classes = tuple(block for block in blocks if isinstance(block, type))
    chosen = {
        name: module
        for name, module in named.items()
        if isinstance(module, classes) or type(module).__name__ in blocks
    }
    if not chosen:
        asked = ", ".join(block if isinstance(block, str) else block.__name__ for block in blocks)
        there = ", ".join(dict.fromkeys(type(module).__name__ for module in named.values()))
        raise ValueError(f"the model has no module of {asked}; its classes are {there}")
    return chosen


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


def _check_word(name: str, word: str, words: Iterable[str]) -> None:
    """Checks that a word is one of some.

    Raises:
        ValueError: If it is another one.
    """
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {word!r}")


def _mesh_of(ranks_per_replica: int | None) -> DeviceMesh:
    """Returns a mesh of all ranks, of two dimensions where some of them hold a replica between them."""
    whole = default_mesh("Recipe.apply()")
    if ranks_per_replica is None:
        return whole
    ranks = dist.get_world_size()
    replicas, rest = divmod(ranks, ranks_per_replica)
    if rest:
        raise ValueError(f"Recipe.apply(): {ranks} ranks are no replicas of {ranks_per_replica}")
    names = ("replicate", "shard")
    return init_device_mesh(whole.device_type, (replicas, ranks_per_replica), mesh_dim_names=names)


def _allocate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives parameters on the meta device memory: on the mesh's device, or on the host if offloaded."""
    params = [sharded for unit in units_in(model).values() for sharded in unit.params if sharded.offloaded]
    on_host = {id(param) for sharded in params for param in sharded.sharded_params}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu" if id(tensor) in on_host else mesh.device_type)

    if any(param.is_meta for param in model.parameters()):
        model._apply(empty)  # type: ignore[no-untyped-call]
