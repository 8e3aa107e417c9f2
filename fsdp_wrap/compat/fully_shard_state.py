"""The state that torch's `fully_shard` and `replicate` keep of a module, imitated for our units.

Proxies pass for instances of torch's classes and compute the attributes that programs read. Other attributes
of torch's raise by name, since a missing one would pass for "not sharded". Importing this file adds torch's
way to ask for the state to our functions, which know nothing of it: `fully_shard.state`, `replicate.state`.
`adapt_fully_shard` rebinds the names of FSDP2 for `compat.install(fully_shard=True)`.
"""

from __future__ import annotations

import importlib
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, cast

from torch import nn

from fsdp_wrap import api
from fsdp_wrap._building import REGISTRY
from fsdp_wrap._by_hand import await_reduction, end_backwards_of, reshard, show_unsharded, unshard
from fsdp_wrap._core import UNIT_ATTR, MixedPrecisionPolicy
from fsdp_wrap._core import torch_private as torchs
from fsdp_wrap._fsdp_module import FSDPModule
from fsdp_wrap._params import Buffers, Segment, Until, Use, Where, tell_use
from fsdp_wrap._runtime import Doing, Unit, step_of
from fsdp_wrap.compat.installation import Installation
from fsdp_wrap.compat.pipelines import adapt_stages
from fsdp_wrap.fully_shard import fully_shard
from fsdp_wrap.replicate import replicate

__all__ = ["adapt_fully_shard", "fully_shard_names", "state_of"]

_USES = {
    Doing.REST: torchs.UseOfUnit.IDLE,
    Doing.FORWARD: torchs.UseOfUnit.FORWARD,
    Doing.BACKWARD: torchs.UseOfUnit.PRE_BACKWARD,
    Doing.OVER: torchs.UseOfUnit.IDLE,
}


def state_of(module: nn.Module) -> UnitState | None:
    """Returns the state of a module to which our `fully_shard` or `replicate` was applied, else None.

    Args:
        module: Any module.
    """
    return UnitState(module.__dict__[UNIT_ATTR]) if isinstance(module, FSDPModule) else None


class _Proxy:
    """Stands for an object of a class of torch's; equal to others of the same unit and key."""

    torchs: ClassVar[type]
    unit: Unit

    def __init__(self, unit: Unit, *others: Any) -> None:
        self.__dict__.update(unit=unit, key=(unit, *others))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # which `isinstance` asks for
        return self.torchs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.torchs) and other.__dict__.get("key") == self.__dict__["key"]

    def __hash__(self) -> int:
        return hash(self.__dict__["key"])

    def __getattr__(self, name: str) -> Any:
        if name in _names_of(self.torchs):
            self._refuse(name)
        raise AttributeError(
            f"torch's {self.torchs.__name__} has no '{name}', nor has what stands for it here"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(type(self), name, None)
        if not isinstance(attribute, property) or attribute.fset is None:
            self._refuse(name)
        attribute.fset(self, value)

    def _refuse(self, name: str) -> NoReturn:
        unit: Unit = self.__dict__["unit"]
        raise RuntimeError(  # and so for `hasattr` and `getattr` with a default, too
            f"'{name}' of torch's {self.torchs.__name__} has no counterpart in fsdp_wrap, whose fully_shard "
            f"has sharded {unit.name}; use the methods of FSDPModule, or torch's fully_shard, without "
            "fsdp_wrap.compat.install(fully_shard=True)"
        )


def _names_of(cls: type) -> set[str]:
    """Returns the names of a class and its instances, and others that their methods use."""
    bodies = [getattr(value, "fget", value) for base in cls.__mro__ for value in vars(base).values()]
    codes = [body.__code__ for body in bodies if hasattr(body, "__code__")]
    return {*dir(cls), *(name for code in codes for name in code.co_names)}


class UnitState(_Proxy):
    """A unit as torch's `FSDPState`."""

    torchs = torchs.FSDPState

    _auto_reshard_after_forward = property(
        attrgetter("unit.options.keeps_as_root"), lambda self, value: self.unit.set(keeps_as_root=value)
    )

    @property
    def _fsdp_param_groups(self) -> list[UnitGroup]:
        return [UnitGroup(unit) for unit in self.unit.over_all_meshes if unit.params]

    _fsdp_param_group = property(lambda self: next(iter(self._fsdp_param_groups), None))
    _modules = property(lambda self: _modules_of(self.unit))

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes in which the unit computes, reduces and returns; its own where none were asked for."""
        casts, dtypes = self.unit.options.casts, self.unit.segments[0].dtypes
        return MixedPrecisionPolicy(dtypes.param, dtypes.reduce, casts.outputs, casts.nested is not None)

    # Refused where it has no parameters.
    _device = property(attrgetter("_fsdp_param_group.unit.buffers.communicator.device"))
    _is_root = property(lambda self: None if self.unit.step is None else not self.unit.nested)
    _state_ctx = property(lambda self: TreeState(step_of(self.unit).root))

    def _lazy_init(self) -> None:
        """Makes this unit the root of those below, unless another unit runs it already."""
        step_of(self.unit)

    def _root_post_backward_final_callback(self) -> None:
        """Waits for the last reduction."""
        await_reduction(step_of(self.unit))


class TreeState(_Proxy):
    """The units of one root as torch's `FSDPStateContext`."""

    torchs = torchs.FSDPStateContext

    @property
    def all_states(self) -> list[UnitState]:
        units = step_of(self.unit).units
        return [UnitState(unit) for unit in units if not unit.mesh_label]  # others are groups of these


class UnitGroup(_Proxy):
    """A unit's parameters as torch's `FSDPParamGroup`."""

    torchs = torchs.FSDPParamGroup

    _buffers = property(attrgetter("unit.buffers"))  # no group is made of a unit without
    _module_fqn = property(lambda self: None if self.unit.step is None else self.unit.fqn)

    @property
    def fsdp_params(self) -> list[UnitParam]:
        pairs = [
            (segment, index) for segment in self._buffers.segments for index in range(len(segment.leaves))
        ]
        return [UnitParam(self.unit, segment, index) for segment, index in pairs]

    # where it communicates

    @property
    def mesh_info(self) -> Any:
        held_by = self._buffers.held_by
        mesh = held_by.mesh  # without those of tensor parallelism
        if held_by.replicated:
            return torchs.DDPMeshInfo(mesh, replicate_mesh_dim=0)
        if mesh.ndim == 1:
            return torchs.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return torchs.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    _is_hsdp = property(lambda self: isinstance(self.mesh_info, torchs.HSDPMeshInfo))
    _all_gather_process_group = property(attrgetter("mesh_info.shard_process_group"))
    _all_reduce_process_group = property(attrgetter("mesh_info.replicate_process_group"))

    # between forward and backward

    @property
    def post_forward_mesh_info(self) -> Any:
        if self.unit.options.reshards_within is not None:
            self._refuse("post_forward_mesh_info")
        return self.mesh_info if self._reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        if info is not None and info.mesh != self.mesh_info.mesh:
            self._refuse("post_forward_mesh_info")
        as_root = self.unit.step is None and self.unit.options.keeps_as_root
        self.unit.set_reshard_after_forward(info is not None)
        if as_root:  # the first forward decides, as in torch
            self.unit.set(keeps_as_root=True)

    @property
    def _reshard_after_forward(self) -> bool:
        """Whether a backward gathers anew; not so for a tensor subclass that is asked for both at once."""
        asked = self._tell_use(whether_both=True)
        if asked is not None:
            return asked is not Use.BOTH
        unit = self.unit
        known_root = unit.step is not None and not unit.nested
        return unit.options.reshard_after_forward and not (known_root and unit.options.keeps_as_root)

    def _tell_use(self, whether_both: bool = False) -> Use | None:
        """Returns what a tensor subclass is asked for now; None if none is."""
        extended = (unit.buffers.segments.extended for unit in self.unit.over_all_meshes)
        return tell_use(chain.from_iterable(extended), whether_both)

    reshard_after_backward = property(attrgetter("unit.options.reshards_after_backward"))

    @property
    def _training_state(self) -> Any:
        """The unit's current use, or that of the gather for which a tensor subclass is asked.

        A program may assign what it is.
        """
        asked = self._tell_use()
        if asked is not None:
            return torchs.UseOfUnit.PRE_BACKWARD if asked is Use.BACKWARD else torchs.UseOfUnit.FORWARD
        return _USES[self.unit.doing]

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        if state is not self._training_state:
            self._refuse("_training_state")

    is_sharded = property(lambda self: self._buffers.where is Where.SHARDED or _waits(self._buffers))
    is_unsharded = property(lambda self: self._buffers.where is Where.FULL and not _waits(self._buffers))

    def unshard(self, async_op: bool = False) -> None:
        """Issues the all-gather."""
        unshard(self.unit)

    def wait_for_unshard(self) -> None:
        """Lets the modules show the full parameters."""
        show_unsharded(self.unit)

    def reshard(self) -> None:
        """Frees the full parameters."""
        reshard(self.unit)

    def post_backward(self, *_: Any) -> None:
        """Ends the backwards of this unit: reshards, and reduces what they have left, unless told not to."""
        end_backwards_of(step_of(self.unit), self.unit)


class UnitParam(_Proxy):
    """One parameter as torch's `FSDPParam`."""

    torchs = torchs.FSDPParam

    def __init__(self, unit: Unit, segment: Segment, index: int) -> None:
        super().__init__(unit, segment.layout.fqns[index])
        self.__dict__.update(segment=segment, index=index)

    segment: Segment
    index: int

    sharded_param = property(lambda self: self.segment.params.sources[self.index])
    _sharded_local_tensor = property(attrgetter("sharded_param._local_tensor"))

    @property
    def _sharded_param_data(self) -> Any:
        local, held_by = self._sharded_local_tensor, UnitGroup(self.unit)._buffers.held_by
        here = self.segment.layout.extents[self.index].shape
        if here.numel() != local.numel() * held_by.size:  # torch's is padded
            self._refuse("_sharded_param_data")
        return local.view(-1)

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The leaf.

        Raises:
            RuntimeError: If its memory is freed.
        """
        buffers = self.unit.buffers
        if buffers.where is not Where.FULL:
            raise RuntimeError(f"the full parameter '{self._param_fqn}' is not in memory; unshard its module")
        return self.segment.leaves[self.index]

    _param_fqn = property(lambda self: self.unit.name_of(self.segment.layout.fqns[self.index]))

    @property
    def _module_info(self) -> Any:
        (module, name), *shared = self.segment.params.display.places[self.index]
        modules, names = [module for module, _ in shared], [name for _, name in shared]
        return torchs.ParamModuleInfo(module, name, modules, names)

    _orig_size = property(attrgetter("sharded_param.shape"))
    sharded_size = property(attrgetter("_sharded_local_tensor.shape"))


def _waits(buffers: Buffers) -> bool:
    """Whether full parameters are there only for the backward of an earlier forward, as torch keeps none."""
    return buffers.stays is Until.EARLIER


def _modules_of(unit: Unit) -> tuple[nn.Module, ...]:
    """Returns the modules that `fully_shard` was given, in their order."""
    return tuple(part for part in unit.module.children() if part in unit.parts) or (unit.module,)


# names

_CLASSES = ("FSDPModule", "ReplicateModule")
"""Torch's own modules hold these only for `isinstance`."""

_NAMES = [name for name in torchs.torch_fully_shard.__all__ if name not in api.__all__]
"""Names of FSDP2 but for configurations: we take torch's."""

_TORCHS = {name: getattr(torchs.torch_fully_shard, name) for name in _NAMES}
_TORCHS |= {name: getattr(torchs.torch_replicate, name) for name in ("replicate", "ReplicateModule")}
"""Torch's objects by the public names of FSDP2, before any installation."""


def _with_state(ours: Any, theirs: Any) -> None:
    """Lets a function of ours tell the state of a module, as one of torch's does."""
    ours.state = lambda module: state_of(module) or theirs.state(module)


_with_state(fully_shard, _TORCHS["fully_shard"])
_with_state(replicate, _TORCHS["replicate"])

_IMPORTER = "torch.distributed._composable.fsdp"
"""A small module of torch with FSDP2's names, loaded first so that it gets torch's back at the end."""

_STAGES = "torch.distributed.pipelining.stage"

_LATER = ("torch.distributed.pipelining.schedules", _STAGES, "torch.distributed._tools.fsdp2_mem_tracker")
"""Large modules, adapted when they are imported."""

_BY_CLASS = (f"{torchs.torch_fully_shard.__name__}._", torchs.torch_replicate.__name__, *_LATER)
"""Prefixes of torch's modules that keep its classes of modules: ours are instances of them, too."""


def fully_shard_names() -> dict[str, tuple[Any, Any]]:
    """Returns (torch's, ours) for every public name of torch's FSDP2 for which we have another object."""
    ours = vars(sys.modules["fsdp_wrap"])  # by now all of it
    return {name: (old, ours[name]) for name, old in _TORCHS.items() if name in ours}


def adapt_fully_shard(installation: Installation) -> list[tuple[Any, Any]]:
    """Makes the names of torch's FSDP2 resolve to ours, in all loaded modules and for later imports.

    Meanwhile our sharded modules are instances of torch's `FSDPModule` or `ReplicateModule` for all code that
    holds that class, and torch's functions that look for a module's state find theirs.

    Args:
        installation: Takes the changes back at its end.

    Returns:
        (torch's, ours) of functions and of `UnshardHandle`.
    """
    importlib.import_module(_IMPORTER)
    names = fully_shard_names()
    classes = [names.pop(name) for name in _CLASSES]
    states = torchs.module_states, ChainMap(torchs.module_states, cast(Any, _OurStates()))
    installation.replace([*names.values(), states], kept=("fsdp_wrap.",))
    installation.replace(classes, kept=("fsdp_wrap.", *_BY_CLASS))
    for name in _LATER:
        installation.when_imported(name, _adapt_importer)
    for theirs, ours in classes:
        if theirs not in ours.__bases__:
            installation.callback(setattr, ours, "__bases__", ours.__bases__)
            ours.__bases__ = (*ours.__bases__, theirs)  # last: whatever we define or inherit goes before
    return [*names.values()]


def _adapt_importer(installation: Installation, module: Any) -> None:
    """Adapts a module of torch that has perhaps been imported just now, and got our names."""
    for name, (old, new) in fully_shard_names().items():
        if name in vars(module):
            setattr(module, name, old)
            if name not in _CLASSES:
                installation.rebind(module, name, new)
    if module.__name__ == _STAGES:
        adapt_stages(installation)


class _OurStates(Mapping[nn.Module, Callable[[], UnitState]]):
    """The states of our modules, as torch's registry has those of its own."""

    def __getitem__(self, module: nn.Module) -> Callable[[], UnitState]:
        state = state_of(module)
        if state is None:
            raise KeyError(module)
        return lambda: state

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module in REGISTRY.taken if state_of(module) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
