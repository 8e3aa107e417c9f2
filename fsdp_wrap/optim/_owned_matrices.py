"""`owned_matrices`: each matrix of a sharded model has one rank that owns its update."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import Communicator
from fsdp_wrap._params import FlatPiece, holding, to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap.optim._owner_group import Compute, Matrix, OwnerGroup
from fsdp_wrap.optim._sharded_params import Communicators, ShardedParam, flattened, sharded_params_in
from fsdp_wrap.optim._views import Block, View, whole

Select = Callable[[str, torch.Size], bool] | Iterable[str] | str | None
Views = Mapping[str, View] | View | None

_ROUND = 1 << 23
"""Elements that an owner gets in a round, unless a single matrix has more."""


def owned_matrices(model: nn.Module, *, select: Select = None, view: Views = None) -> OwnedMatrices:
    """Gives each matrix of a model one rank that owns its update. Collective.

    For optimizers that compute with whole matrices. Parameters, gradients and elementwise state stay sharded.
    A matrix is sent to its owner, which calls the function, and the result comes back. Ranks share the
    costs evenly; replicas take part. A matrix of which the owner alone has anything does not travel.

    Args:
        model: Wrapped by `FullyShardedDataParallel`, sharded by `fully_shard`, both, or plain; its parameters
            may be `DTensor`s. A parameter outside of units that is no `DTensor` is owned by each rank itself.
        select: Which parameters: a function of name (in the unwrapped module) and shape, or names as patterns
            of `fnmatch`. By default those of two dimensions, except of embeddings, and those that a dict of
            views names.
        view: How parameters are cut into matrices (`per_head`, `split`, `batch`): a dict by name, as
            patterns, or one view for all that are selected.

    Raises:
        ValueError: If a pattern names nothing, a selected parameter is no matrix and has no view, a view does
            not fit, or the ranks do not select and cut the same.
        TypeError: If `model` is no module, or `select` or `view` of another type.
        RuntimeError: Inside a forward or backward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"owned_matrices takes a torch.nn.Module, not a {type(model).__name__}")
    require_idle(units_in(model).values(), "owned_matrices()")
    everything = sharded_params_in(model)
    views = _views_of(everything, view)
    named = views if isinstance(view, Mapping) else {}
    return OwnedMatrices(selected(everything, select, named), views)


class OwnedMatrices:
    """Matrices of a sharded model, each with a rank that owns its update; `owned_matrices` makes it.

    Args:
        held: The parameters.
        views: By their first names, how they are cut into matrices; others are one.

    Attributes:
        params: These parameters as an optimizer holds them: `DTensor`s, slices, or parts of a
            `FlatParameter`, which `model.parameters()` does not have.
        names: Their names in the unwrapped module.
        matrices: All matrices, in the order of parameters.
    """

    def __init__(self, held: Sequence[ShardedParam], views: Mapping[str, View]) -> None:
        self.params = [sharded.param for sharded in held]
        self.names = [sharded.fqn for sharded in held]
        blocks = [_blocks(sharded, views.get(sharded.fqn, whole)) for sharded in held]
        self._held, self._owner_groups = held, _owner_groups_of(held, blocks)
        order = {fqn: index for index, fqn in enumerate(self.names)}
        matrices = [matrix for group, _ in self._owner_groups for matrix in group.matrices]
        self.matrices: list[Matrix] = sorted(matrices, key=lambda matrix: order[matrix.parameter])

    def __repr__(self) -> str:
        return f"OwnedMatrices({len(self.matrices)} matrices of {len(self.params)} parameters)"

    def update(
        self,
        values: Sequence[torch.Tensor | None],
        function: Callable[[torch.Tensor, Matrix], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor | None]:
        """Applies a function to whole matrices, each on its owner; collective.

        Args:
            values: For each of `params` something of its form, such as the gradient, or None where there is
                nothing to do. All ranks have a value, or none has; what ranks without elements say is
                of no account.
            function: Takes a matrix (rows x columns, which it may overwrite) and what tells of it; returns a
                tensor of the same shape. State of its own it may keep by `matrix.name`: owners do not change.
            dtype: In which matrices travel and are computed with; by default the widest of the parameters'.

        Returns:
            Results, placed as the values are.

        Raises:
            ValueError: If there are other than so many values.
            RuntimeError: On all ranks, before anything travels, if some have a value and others none; on all
                ranks, if the function has raised or returned another shape on any: it names the matrix.
        """
        if len(values) != len(self.params):
            raise ValueError(f"there are {len(self.params)} parameters, and {len(values)} values were given")
        for param in self.params:
            if isinstance(param, FlatPiece):
                param.follow()
        active = self.agreed([value is not None for value in values])
        guarded = _Guarded(function)
        with torch.no_grad():
            results = self.compute(values, active, guarded, dtype)
        for group, _ in self._owner_groups:
            guarded.tell(group.communicator)
        return [
            None if value is None or result is None else holding(value, result)
            for value, result in zip(values, results)
        ]

    def agreed(self, present: Sequence[bool]) -> list[bool]:
        """Returns for which parameters there are values, after all ranks have told; collective.

        Args:
            present: For each of `params`, whether this rank has a value.

        Raises:
            RuntimeError: On all ranks, if some have one and others none; it names the parameter.
        """
        result = [*present]
        for group, indices in self._owner_groups:
            told = [present[index] if self._held[index].parts else None for index in indices]
            for index, known in zip(indices, group.agreed(told)):
                result[index] = known
        return result

    def compute(
        self,
        values: Sequence[torch.Tensor | None],
        active: Sequence[bool],
        compute: Compute,
        dtype: torch.dtype | None,
    ) -> list[torch.Tensor | None]:
        """Does what `update` does, without its checks.

        Args:
            values: The values given to `update`.
            active: The result of `agreed`.
            compute: Takes stacks of small matrices of one shape, or a stack of one; it must not raise.
            dtype: The dtype given to `update`.

        Returns:
            This rank's part of each result.
        """
        results: list[torch.Tensor | None] = [None] * len(values)
        for group, indices in self._owner_groups:
            flat = [None if value is None else flattened(value) for value in (values[i] for i in indices)]
            parts = group.update(flat, [active[index] for index in indices], compute, dtype)
            for index, result in zip(indices, parts):
                value = values[index]
                if result is not None and value is not None:
                    results[index] = result.view(to_local(value).shape)
        return results


class _Guarded:
    """A user's function of one matrix that never raises inside collectives; `tell` raises its error later."""

    def __init__(self, function: Callable[[torch.Tensor, Matrix], torch.Tensor]) -> None:
        self._function = function
        self._error: Exception | None = None
        self._told = ""

    def __call__(self, stack: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
        return torch.stack([self._result(value, matrix) for value, matrix in zip(stack, matrices)])

    def _result(self, value: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        try:
            result = self._function(value, matrix)
            if not isinstance(result, torch.Tensor) or result.shape != value.shape:
                returned = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"it returned {returned}, not a tensor of shape {matrix.shape}")
            return result.to(value.dtype)
        except Exception as error:
            if self._error is None:
                self._error = error
                self._told = (
                    f"the function of a matrix failed with '{matrix.name}' of shape {matrix.shape} on rank "
                    f"{matrix.owner}: {type(error).__name__}: {error}"
                )
            return torch.zeros_like(value)

    def tell(self, communicator: Communicator) -> None:
        """Raises on all ranks if the function raised on any; collective."""
        if told := [message for message in communicator.all_gather_object(self._told) if message]:
            raise RuntimeError(told[0]) from self._error


def _owner_groups_of(
    held: Sequence[ShardedParam], blocks: Sequence[list[Block]]
) -> list[tuple[OwnerGroup, list[int]]]:
    """Groups the parameters by the ranks over which they are sharded."""
    communicators = Communicators()
    members: dict[Communicator, list[int]] = {}
    for index, sharded in enumerate(held):
        members.setdefault(communicators.of(sharded), []).append(index)
    order = sorted(members.items(), key=lambda item: sorted(item[0].members))  # on all ranks the same
    return [
        (OwnerGroup(communicator, [held[i] for i in indices], [blocks[i] for i in indices], _ROUND), indices)
        for communicator, indices in order
    ]


def _blocks(held: ShardedParam, view: View) -> list[Block]:
    try:
        return view(held.shape)
    except ValueError as error:
        raise ValueError(f"parameter '{held.fqn}' of shape {tuple(held.shape)} {error}") from None


# what is chosen


def matches(held: ShardedParam, patterns: Iterable[str]) -> bool:
    """Whether any name of a parameter fits any pattern."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in held.names)


def check_patterns(held: Sequence[ShardedParam], patterns: Iterable[str], argument: str) -> None:
    """Raises if a pattern fits no parameter."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} takes names as strings, not {pattern!r}")
        if not any(matches(sharded, [pattern]) for sharded in held):
            names = ", ".join(sharded.fqn for sharded in held[:3])
            raise ValueError(
                f"{argument}: '{pattern}' names no parameter of the model, which has {names}, ..."
            )


def _views_of(held: Sequence[ShardedParam], view: Views) -> dict[str, View]:
    if view is None:
        return {}
    if callable(view):
        return {sharded.fqn: view for sharded in held}
    if not isinstance(view, Mapping) or not all(map(callable, view.values())):
        raise TypeError("view must be a view, such as per_head(8), or a dict of views by name")
    check_patterns(held, view, "view")
    return {
        sharded.fqn: next(chosen for pattern, chosen in view.items() if matches(sharded, [pattern]))
        for sharded in held
        if matches(sharded, view)
    }


def _is_matrix(held: ShardedParam) -> bool:
    return len(held.shape) == 2 and held.shape.numel() > 0 and not held.embeds


def selected(held: Sequence[ShardedParam], select: Select, named: Container[str] = ()) -> list[ShardedParam]:
    """Returns the parameters that `select` chooses.

    By default these are matrices with elements, but for embeddings, and what is named.
    """
    if select is None:
        return [sharded for sharded in held if sharded.fqn in named or _is_matrix(sharded)]
    if callable(select):
        return [sharded for sharded in held if select(sharded.fqn, sharded.shape)]
    if not isinstance(select, Iterable):
        raise TypeError(f"select must be a function or names, not {type(select).__name__}")
    patterns = [select] if isinstance(select, str) else [*select]
    check_patterns(held, patterns, "select")
    return [sharded for sharded in held if matches(sharded, patterns)]
