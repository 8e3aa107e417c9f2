"""`on_shards`: an elementwise optimizer steps on plain shards, not on `DTensor`s.

Each operator on a `DTensor` goes through its dispatcher, which takes longer than the operator where shards
are small. An elementwise update of the shard is that of the whole, so only the local tensors are needed.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain, compress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import is_owned
from fsdp_wrap._core.torch_private import DTensorSpec
from fsdp_wrap._params import to_local
from fsdp_wrap._state import is_state_offloaded, placed_like
from fsdp_wrap.optim._probe import TrialGroup, by_rows, computes_with_wholes, knows_its_shards
from fsdp_wrap.optim._shard_runs import ShardRun, ShardRuns, State, same

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

_SHARDS = "_fsdp_shards"
_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
_LOCAL = operator.attrgetter("_local_tensor")
_GRAD_SPEC, _GRAD_LOCAL = operator.attrgetter("grad._spec"), operator.attrgetter("grad._local_tensor")


def on_shards(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Lets an elementwise optimizer step on the plain shards behind `DTensor`s.

    Only how `step` computes changes: the numbers are the same. Between steps parameter groups, state and
    state dicts have `DTensor`s, as before. Parameters that are plain already, as the wrapper's, stay
    as they are. Nothing is communicated, unless a gradient is placed otherwise than its parameter.

    A closure is called once, before the step. Foreach and fused ways work, also those that refuse `DTensor`s.

    Args:
        optimizer: Its update of each element depends on nothing but that element, its gradient and state, and
            numbers that are the same for all. So do all of torch's own but LBFGS, Adafactor and Muon. Others
            of its class take a few steps on small tensors to find out.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If it is no `torch.optim.Optimizer`.
        ValueError: If it is found not to be elementwise, is differentiable, or its `step` was replaced, as a
            learning rate scheduler does: make that afterwards.
    """
    if _is_converted(optimizer):
        return optimizer
    check_elementwise(optimizer, "on_shards")
    kind = type(optimizer)
    optimizer.__dict__.pop(_SHARDS, None)  # of steps before
    optimizer.__class__ = _stepping_on_shards(kind)  # type: ignore[arg-type]
    return optimizer


def _is_converted(optimizer: Any) -> bool:
    return vars(type(optimizer)).get("__reduce__") is _reduce


def check_elementwise(optimizer: Any, by: str) -> None:
    """Refuses optimizers that cannot step on this rank's shards alone; `by` is the caller, for messages."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{by} takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    kind = type(optimizer)
    if knows_its_shards(optimizer):
        raise ValueError(f"{kind.__name__} knows of shards: use it without {by}")
    if any(computes_with_wholes(optimizer, group, by_rows) for group in map(_tried, optimizer.param_groups)):
        raise ValueError(
            f"{kind.__name__} computes with whole parameters, of which a shard is a part: it cannot step on "
            "shards alone. Use an elementwise optimizer, such as AdamW; or for matrices "
            "fsdp_wrap.optim.Muon, or a function of your own with owned_matrices()"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"this {kind.__name__} is differentiable, and gradients would not find their way through shards: "
            "make it with differentiable=False"
        )
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"the step of this {kind.__name__} was replaced, perhaps by a learning rate scheduler: call "
            f"{by} first, and make the scheduler afterwards"
        )


def _tried(group: dict[str, Any]) -> TrialGroup:
    """Returns how a group is tried: with tensors of as many dimensions as its parameters have."""
    params: list[nn.Parameter] = group["params"]
    options = {name: value for name, value in group.items() if name != "params"}
    dims = frozenset(param.dim() for param in params)
    return TrialGroup(options, dims, device=params[0].device if params else torch.device("cpu"))


@functools.cache
def _stepping_on_shards(kind: type[Any]) -> type[Any]:
    """Returns a class like another, whose instances step on plain shards."""
    return stepping_within(kind, shards_shown_to, __reduce__=_reduce)


def stepping_within(
    kind: type[Any], around: Callable[[Any], AbstractContextManager[None]], **members: Any
) -> type[Any]:
    """Derives a class with other members whose steps call the closure and then run in a context."""
    step_of_kind = without_hooks(kind.step)  # which see the `DTensor`s

    @functools.wraps(step_of_kind)
    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()  # which may look at parameters and gradients
        with around(self):
            result = step_of_kind(self, *args, **kwargs)
        return result if closure is None else loss

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # else torch would do so again
    members |= {"step": hooked, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def without_hooks(step: Any) -> Any:
    """Returns the step of an optimizer's class without torch's wrapper, which calls hooks."""
    while getattr(step, "__code__", None) is _CALLS_HOOKS:
        step = step.__wrapped__
    return step


def _reduce(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    kind = type(optimizer).__mro__[1]
    return _remade, (kind, optimizer.__getstate__())


def _remade(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return on_shards(optimizer)


def put_in_order(state: dict[Any, State], params: Sequence[Any]) -> None:
    """Gives the state of an optimizer the order of its parameters, which is the same on all ranks.

    State dict functions gather the values in this order, and steps make them in another on each rank.
    """
    wanted = [param for param in params if param in state]
    known = {*wanted}
    if not same([key for key in state if key in known], wanted):
        for param in wanted:
            state[param] = state.pop(param)


def shards_shown_to(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Gives an optimizer plain shards in place of `DTensor`s."""
    shards = optimizer.__dict__[_SHARDS] = optimizer.__dict__.get(_SHARDS) or _KeptShards()
    return shards.shown_to(optimizer)


def exchange_shards(optimizer: torch.optim.Optimizer, shards: Any) -> Any:
    """Gives an optimizer the shards of other parameters; returns those that it had, or None."""
    before, optimizer.__dict__[_SHARDS] = optimizer.__dict__.get(_SHARDS), shards
    return before


class _KeptShards:
    """Keeps an optimizer's plain shards between steps, until other code drops a parameter or its state.

    So their memory is freed when other code replaces these, as it does to move them to the host.
    """

    def __init__(self) -> None:
        self._shards: _PlainShards | None = None
        self._gone = partial(_let_go, weakref.ref(self))

    def shown_to(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Gives an optimizer shards, with gradients and state, in place of `DTensor`s."""
        if self._shards is None or not self._shards.are_of(optimizer.param_groups):
            self._shards = _PlainShards(optimizer, self._gone)
        return self._shards.shown_to(optimizer)


def _let_go(kept: weakref.ref[_KeptShards], _: Any) -> None:
    """Frees the shards; a step in progress keeps its own."""
    if (kept_shards := kept()) is not None:
        kept_shards._shards = None


class _PlainShards:
    """Plain shards in place of the `DTensor`s of one optimizer in its steps.

    The state of a shard has the memory of that of its `DTensor`. Which tensors both have is compared before
    and after each step: what others have put there is taken over. `gone` is called when others drop any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gone: Callable[[Any], None]) -> None:
        groups, kind = optimizer.param_groups, type(optimizer)
        chosen = [_chosen(group, takes_all=_is_converted(optimizer)) for group in groups]
        self._known = _params_in(groups)
        self._fused = [group.get("fused") for group in groups]
        self._all = [*chain.from_iterable(chosen)]  # the `DTensor`s that are shown as shards
        shown = {*self._all}
        self._others = [param for param in self._known if param not in shown]
        self._memory, self._gone = _memory_of(self._all), gone
        self._watched = self._watching(map(_LOCAL, self._all))
        joins = kind.__module__.startswith("torch.optim.") and not any(map(is_state_offloaded, self._all))
        self._runs = ShardRuns(params for params, fused in zip(chosen, self._fused) if joins and not fused)
        self._wanted: list[ShardRun] = []  # those whose gradients lie as the shards do
        self._joint: list[ShardRun] = []  # those of them that are updated as one
        self._params: list[Any] = []  # the `DTensor`s in none of these
        self._shards: list[nn.Parameter] = []
        self._lists: list[list[nn.Parameter]] = []  # of the groups, with shards in place of `DTensor`s
        self._grad_specs: list[DTensorSpec] = []  # of gradients that are placed as their parameters
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._public, self._own = _StateSnapshot(), _StateSnapshot()

    def are_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether groups have these parameters, with the memory that they had."""
        known = same(_params_in(groups), self._known) and _memory_of(self._all) == self._memory
        return known and [group.get("fused") for group in groups] == self._fused

    @contextmanager
    def shown_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Gives an optimizer shards, with gradients and state, in place of `DTensor`s."""
        groups, public = optimizer.param_groups, optimizer.state
        grads = self._runs.joint_gradients()
        self._arrange(groups, public, [*grads])
        lists = [group["params"] for group in groups]
        with self._gradients([grads[run] for run in self._joint]):
            for group, params in zip(groups, self._lists):
                group["params"] = params
            optimizer.state = self._state
            try:
                yield
            finally:
                optimizer.state = public
                for group, params in zip(groups, lists):
                    group["params"] = params
                self._hand_back(public)

    def _arrange(
        self, groups: Sequence[dict[str, Any]], public: dict[Any, State], runs: list[ShardRun]
    ) -> None:
        """Chooses the shards for the `DTensor`s and takes over their state, if anything has changed."""
        if self._runs.are_untouched and same(runs, self._wanted) and self._public.is_in(public):
            return
        joint = self._runs.take_state(runs, public)
        self._wanted, self._joint = runs, [*joint]
        in_runs = {param for run in joint for param in run.params}
        self._params = [param for param in self._all if param not in in_runs]
        self._shards = [*map(_shard_of, self._params)]
        stand_ins = {param: [shard] for param, shard in zip(self._params, self._shards)}
        stand_ins |= {param: [] for param in in_runs} | {run.params[0]: [run.shard] for run in joint}
        self._lists = [
            [stand_in for param in group["params"] for stand_in in stand_ins.get(param, [param])]
            for group in groups
        ]
        self._state = defaultdict(dict, {run.shard: state for run, state in joint.items()})
        self._state |= {key: state for key, state in public.items() if key not in stand_ins}
        taken = [
            (public[param], shard) for param, shard in zip(self._params, self._shards) if param in public
        ]
        self._state |= {shard: {key: to_local(state[key]) for key in state} for state, shard in taken}
        self._note(public)

    @contextmanager
    def _gradients(self, joint: Sequence[torch.Tensor]) -> Iterator[None]:
        """Gives shards their gradients, which are not kept longer than those of the `DTensor`s."""
        grads = self._local_gradients()
        written = [param for param, grad in zip(self._params, grads) if grad is not None]
        written += chain.from_iterable(run.params for run in self._joint)
        written += [param for param in self._others if param.grad is not None]
        shards = [*self._shards, *(run.shard for run in self._joint)]
        for shard, grad in zip(shards, [*grads, *joint]):
            shard.grad = grad
        try:
            yield
        finally:
            for shard in shards:
                shard.grad = None
            increment_version(written)

    def _local_gradients(self) -> list[torch.Tensor | None]:
        with suppress(AttributeError):  # there is none
            if same([*map(_GRAD_SPEC, self._params)], self._grad_specs):
                return [*map(_GRAD_LOCAL, self._params)]
        grads = [as_placed(param) for param in self._params]
        self._grad_specs = [grad._spec for grad in grads if grad is not None]
        return [None if grad is None else grad._local_tensor for grad in grads]

    def _hand_back(self, public: dict[Any, State]) -> None:
        """Puts state that a step has made or replaced into the `DTensor`s' state."""
        if self._runs.hand_back(public) or not self._own.is_in(self._state):
            self._hand_back_singly(public)
            put_in_order(public, self._known)
            self._note(public)

    def _hand_back_singly(self, public: dict[Any, State]) -> None:
        owners = dict(zip(self._shards, self._params))
        shards = {*owners, *(run.shard for run in self._joint)}
        public.update({key: state for key, state in self._state.items() if key not in shards})
        for param, state in [(owners[key], state) for key, state in self._state.items() if key in owners]:
            known = public.setdefault(param, {})
            for name in known.keys() - state.keys():
                del known[name]
            for name, value in state.items():
                if name not in known or to_local(known[name]) is not value:
                    known[name] = placed_like(param, name, value)

    def _note(self, public: dict[Any, State]) -> None:
        self._public = _StateSnapshot(public, self._all, self._watching)
        self._own = _StateSnapshot(self._state, self._shards)

    def _watching(self, values: Iterable[Any]) -> list[Any]:
        return [
            weakref.ref(value, self._gone) if isinstance(value, torch.Tensor) else value for value in values
        ]


class _StateSnapshot:
    """The values in an optimizer's state, compared by identity to see whether others have changed it.

    `hold` returns what is kept of them.
    """

    def __init__(
        self, state: Any = None, params: Sequence[Any] = (), hold: Callable[..., Any] = list
    ) -> None:
        known = {*params}
        self._looked_at = [param in known for param in state or ()]
        values = self._values_in(state or {})
        self._ids = None if state is None else self._ids_of(state, values)
        self._held = hold(values)

    def is_in(self, state: dict[Any, State]) -> bool:
        """Whether a state is the same object, with the same values."""
        return self._ids_of(state, self._values_in(state)) == self._ids

    def _values_in(self, state: dict[Any, State]) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, compress(state.values(), self._looked_at)))]

    def _ids_of(self, state: dict[Any, State], values: list[Any]) -> list[int]:
        return [id(state), *map(id, state.values()), *map(id, values)]


def _chosen(group: dict[str, Any], takes_all: bool) -> list[Any]:
    """Returns the `DTensor`s of a group that are shown as shards: all of them or none."""
    dtensors: list[Any] = [param for param in group["params"] if isinstance(param, DTensor)]
    ours = all(is_owned(param) and type(param._local_tensor) is torch.Tensor for param in dtensors)
    return dtensors if takes_all or ours else []


def _params_in(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    return [*chain.from_iterable(group["params"] for group in groups)]


def _memory_of(params: Sequence[Any]) -> list[int]:
    locals_ = [*map(_LOCAL, params)]
    return [*map(id, locals_), *map(torch.Tensor.data_ptr, locals_)]


def _shard_of(param: Any) -> nn.Parameter:
    shard = nn.Parameter(param._local_tensor, requires_grad=param.requires_grad)
    if param.requires_grad:
        shard.grad_dtype = param.grad_dtype
    return shard


def as_placed(param: Any) -> Any:
    """Returns the gradient, placed as the parameter is; collective where it is not."""
    grad = param.grad
    if grad is None or grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)
