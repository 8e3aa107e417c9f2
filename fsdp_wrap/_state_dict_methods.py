"""The wrapper's methods for state dicts of the model, in every kind, and of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import calling
from fsdp_wrap._core import (
    OptimStateDictConfig,
    OptimStateKeyType,
    PlugIn,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    clean_fqn,
    warn_caller,
)
from fsdp_wrap._core.torch_private import IncompatibleKeys
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._settings import resolve_settings
from fsdp_wrap._state import (
    Targets,
    begin_load,
    by_mesh,
    full_optim_state_dict,
    gathers,
    load_optim_state_dict,
    only_rank,
    refitted,
    rekey_optim_state_dict,
    sharded_buffers,
    sharded_optim_state_dict,
    take_state_dict,
    taking,
    to_load,
    wants_dtensors,
)

_Destination = TypeVar("_Destination", bound=dict[str, Any])

_deferred: ContextVar[bool] = ContextVar("fsdp_wrap_deferred", default=False)
"""Whether the running load writes back to the shards only at its end."""


class _OpenLoad(PlugIn):
    """A load of a state dict that has begun. It ends when the user does something else after a failed one.

    Args:
        wrapper: The wrapper whose unit is loaded.
        end: Ends it: with True what was loaded counts.
    """

    def __init__(self, wrapper: StateDictMethods, end: Callable[[bool], None]) -> None:
        self._wrapper, self._unit, self._end = weakref.ref(wrapper), wrapper._unit, end
        wrapper._unit.plug_ins.attach(self)

    def rests(self, step: Any) -> None:
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper._end_load()

    def end(self, keep: bool) -> None:
        """Shows the sharded parameters again; drops what was loaded, or keeps it."""
        self._unit.plug_ins.detach(self)
        self._end(keep)


class StateDictMethods(nn.Module):
    """The state dict methods of a wrapped module."""

    _unit: Unit
    _state_dict_settings: StateDictSettings
    _load: _OpenLoad | None  # that has begun here and not ended
    _load_errors: list[str] | None  # of the load that has come here last

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the kind of state dicts of all instances at and below `module`.

        Args:
            module: Any module.
            state_dict_type: The kind for model and optimizer.
            state_dict_config: The configuration of model state dicts, of the kind's type; None for defaults.
            optim_state_dict_config: The same for optimizer state dicts.

        Returns:
            The previous settings.

        Raises:
            TypeError: If a configuration does not belong to the kind.
            ValueError: If the instances had different settings before.
        """
        settings = _resolved(module, state_dict_type, state_dict_config, optim_state_dict_config)
        previous = StateDictMethods.get_state_dict_type(module)
        for wrapper in _wrappers_in(module):
            wrapper._state_dict_settings = settings
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Returns the settings of all instances at and below `module`; the defaults if there is none.

        Args:
            module: Any module.

        Raises:
            ValueError: If the instances have different settings.
        """
        wrappers = _wrappers_in(module)
        settings = wrappers[0]._state_dict_settings if wrappers else resolve_settings()
        for wrapper in wrappers:
            if wrapper._state_dict_settings != settings:
                raise ValueError(
                    f"{wrapper._unit.name} makes state dicts by {wrapper._state_dict_settings}, and "
                    f"{wrappers[0]._unit.name} by {settings}; choose one kind with set_state_dict_type()"
                )
        return settings

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Sets the kind of state dicts as `set_state_dict_type` does, while the context is open.

        Args:
            module: Any module.
            state_dict_type: The kind for model and optimizer.
            state_dict_config: The configuration of model state dicts, of the kind's type; None for defaults.
            optim_state_dict_config: The same for optimizer state dicts.

        Raises:
            TypeError: If a configuration does not belong to the kind.
        """
        settings = _resolved(module, state_dict_type, state_dict_config, optim_state_dict_config)
        return settings_of(module, settings)

    @overload
    def state_dict(
        self, *, destination: _Destination, prefix: str = ..., keep_vars: bool = ...
    ) -> _Destination: ...

    @overload
    def state_dict(self, *, prefix: str = ..., keep_vars: bool = ...) -> dict[str, Any]: ...

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns a state dict of the kind chosen by `state_dict_type`, under the unwrapped module's names.

        By default the values are full tensors, the same on every rank, and the call is collective. They are
        copies, so later training does not change them; so are the pieces of sharded kinds, except with
        `keep_vars`. Ignored parameters, and the tensors of ignored modules, are not copied, as in the state
        dict of a plain module, unless `offload_to_cpu` is set.

        Args:
            destination: A dict to add to; None for a new one.
            prefix: Text in front of every name.
            keep_vars: Give this rank's own pieces and buffers, which later steps change, instead of copies.
        """
        settings = self._state_dict_settings
        only = only_rank(self, settings.state_dict_config)
        wanted = only is None or only.is_here
        with ExitStack() as opened:
            call, outermost = opened.enter_context(taking(destination, self, prefix, wanted))
            if outermost:
                require_idle([self._unit], "state_dict()")
                # Refuses replaced parameters, before any communication.
                all_buffers = sharded_buffers(units_in(self).values())
                asked = [buffers.communicator.positions for buffers in all_buffers if gathers(settings)]
                opened.enter_context(calling("state_dict()", asked))
            for pre_hook in self._state_dict_pre_hooks.values():
                pre_hook(self, prefix, keep_vars)
            drops = not wanted and (outermost or call.wanted)
            earlier = set(call.destination) if drops else set[str]()
            destination = take_state_dict(
                self._unit, settings, call, only=only, prefix=prefix, keep_vars=keep_vars
            )
        for hook in self._state_dict_hooks.values():
            changed = hook(self, destination, prefix, destination._metadata.get(prefix[:-1], {}))
            if changed is not None and not getattr(hook, "_from_public_api", False):
                destination = changed
        for key in set(destination) - earlier if drops else ():
            del destination[key]
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Loads a state dict of the kind chosen by `state_dict_type`; collective.

        Args:
            state_dict: Values by names of the unwrapped module. Full tensors must be the same on every rank.
            strict: Whether names must match exactly.
            assign: Must be False: sharded parameters cannot be replaced by full ones.

        Returns:
            Missing and unexpected keys, as `torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: If the state dict does not fit; then nothing is loaded.
            TypeError: If `state_dict` is no mapping.
            ValueError: If `assign` is True.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace sharded parameters; leave assign out"
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must map names to tensors, and is a {type(state_dict).__name__}")
        require_idle([self._unit], "load_state_dict()")
        targets, kind = Targets(self), self._state_dict_settings.state_dict_type
        if targets.load(state_dict, pieces=kind is not StateDictType.FULL_STATE_DICT):
            return IncompatibleKeys([], [])
        copied, problems = to_load(self, state_dict)
        targets.refuse(problems)
        known_to_fit = targets.check(copied, strict, kind)
        with self._loads_all_or_nothing(deferred=not known_to_fit):
            keys: IncompatibleKeys = super().load_state_dict(copied, strict)
            return keys

    @contextmanager
    def _loads_all_or_nothing(self, deferred: bool) -> Iterator[None]:
        """Ends a load, with clean names in its error.

        With `deferred`, shards are written only at the end, when no module has raised. Until then all loaded
        units hold full parameters.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()] if deferred else []
        token, succeeded = _deferred.set(deferred), False
        try:
            yield
            succeeded = True
        except RuntimeError as error:
            raise RuntimeError(clean_fqn(str(error))) from None
        finally:
            _deferred.reset(token)
            for wrapper in _wrappers_in(self):
                wrapper._end_load(succeeded)
            for buffer, value in () if succeeded else buffers:
                buffer.copy_(value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Torch calls this for each module of a load, also of a plain module above this wrapper.
        self._end_load()
        self._load_errors = args[-1]
        kind = self._state_dict_settings.state_dict_type
        assigns = args[0].get("assign_to_params_buffers", False)  # a plain parent's `assign=True`
        in_full = _deferred.get() or assigns
        _, strict, missing, _, errors = args
        end = begin_load(
            self._unit,
            kind,
            state_dict,
            prefix,
            strict=strict,
            missing=missing,
            errors=errors,
            in_full=in_full,
        )
        self._load = _OpenLoad(self, end)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _end_load(self, keep: bool = False) -> None:
        """Ends the load of a state dict, if one has begun; drops what was loaded, or keeps it."""
        load, self._load = self._load, None
        if load is not None:
            load.end(keep)


_load_known = partial(load_optim_state_dict, only_known=True)


class OptimStateDictMethods:
    """The state dict methods of a wrapped module's optimizer."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Returns an optimizer's state under the names of the unwrapped module's parameters.

        `state_dict_type` sets the kind: full tensors (the default), or this rank's pieces with both others.

        Args:
            model: The wrapped module, or a module that contains it.
            optim: An optimizer of the model's parameters.
            optim_state_dict: The optimizer's own state dict; None to take it now.
            group: Accepted without effect: every unit knows its ranks.

        Returns:
            A dict with `state` by name, and `param_groups` with names.

        Raises:
            ValueError: If the optimizer has parameters of other models, or state that is not elementwise.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        to_host = config.offload_to_cpu
        if wants_dtensors(config):
            return full_optim_state_dict(model, optim, optim_state_dict, to_host=to_host, by_rows=True)
        if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
            return sharded_optim_state_dict(model, optim, optim_state_dict, to_host=to_host)
        only = only_rank(model, config)
        return full_optim_state_dict(model, optim, optim_state_dict, to_host=to_host, only=only)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Converts a result of `optim_state_dict` to an argument of `optim.load_state_dict`.

        Values may be full tensors, pieces of this rank, `DTensor`s or `ShardedTensor`s. With `rank0_only` in
        the configuration only the first rank's dict is read. If `state_dict_type` is not full, ranks exchange
        pieces of another wrapping (collective). Parameters outside of all instances are left out if the dict
        does not have them, unless `load_directly` is True: add their state to the result.

        Args:
            model: The wrapped module, or a module that contains it.
            optim: An optimizer of the model's parameters.
            optim_state_dict: State by name.
            is_named_optimizer: Key by names even if the optimizer's own keys are numbers.
            load_directly: Also load the result into `optim`.
            group: Accepted without effect: every unit knows its ranks.

        Raises:
            TypeError: If `optim_state_dict` is no optimizer state dict.
            ValueError: If the state does not fit; then nothing is loaded.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        first = getattr(settings.optim_state_dict_config, "rank0_only", False)
        if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
            optim_state_dict = refitted(model, optim_state_dict)
        load = load_optim_state_dict if load_directly else _load_known
        result = load(model, optim, optim_state_dict, from_first_rank=first, by_name=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Returns an optimizer state dict keyed by names, or by positions of parameters in an optimizer.

        Args:
            optim_state_dict: State by names or positions, with full or sharded values.
            optim_state_key_type: The keys of the result.
            model: The module, wrapped or not.
            optim_input: The parameters or groups that the optimizer was made from; deprecated.
            optim: The optimizer; None for an optimizer of `model.parameters()`.

        Raises:
            TypeError: If `optim_state_key_type` is no `OptimStateKeyType`.
            ValueError: If both `optim` and `optim_input` are given, or the optimizer has no such parameters.
        """
        warn_of_optim_input(optim_input)
        return rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)


def warn_of_optim_input(optim_input: Any) -> None:
    if optim_input is not None:
        message = "the `optim_input` argument is deprecated: pass optim, or neither for model.parameters()"
        warn_caller(message, FutureWarning)


def _resolved(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    settings = resolve_settings(kind, config, optim_config)
    return by_mesh(settings, (wrapper._unit for wrapper in _wrappers_in(module)))


@contextmanager
def settings_of(module: nn.Module, settings: StateDictSettings) -> Iterator[None]:
    """Sets the settings of all wrappers at and below a module while the context is open."""
    wrappers = _wrappers_in(module)
    previous = [wrapper._state_dict_settings for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper._state_dict_settings = settings
    try:
        yield
    finally:
        for wrapper, before in zip(wrappers, previous):
            wrapper._state_dict_settings = before


def _wrappers_in(module: nn.Module) -> list[StateDictMethods]:
    wrappers = (unit.module for unit in units_in(module).values())
    return [wrapper for wrapper in wrappers if isinstance(wrapper, StateDictMethods)]


def end_load(module: nn.Module, incompatible_keys: Any) -> None:
    """Writes the loaded parameters to the shards; a post-hook of `load_state_dict`."""
    assert isinstance(module, StateDictMethods)
    if not _deferred.get():
        module._end_load(keep=True)
    if module._load_errors is not None:
        module._load_errors[:] = map(clean_fqn, module._load_errors)
    for keys in incompatible_keys:
        for index in reversed(range(len(keys))):
            name, keys[index] = keys[index], clean_fqn(keys[index])
            if name == keys[index]:
                break  # a wrapper below has cleaned this key and all before it
