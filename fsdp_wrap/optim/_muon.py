"""`Muon` of sharded models: each rank orthogonalises the updates of some whole matrices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_wrap._core.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_
from fsdp_wrap._params import FlatPiece, copyable, holding, to_local
from fsdp_wrap.optim._newton_schulz import Coefficients, orthogonalized
from fsdp_wrap.optim._on_shards import as_placed, on_shards, put_in_order
from fsdp_wrap.optim._owned_matrices import (
    OwnedMatrices,
    Select,
    Views,
    check_patterns,
    matches,
    owned_matrices,
)
from fsdp_wrap.optim._owner_group import Matrix
from fsdp_wrap.optim._probe import note_knows_shards
from fsdp_wrap.optim._sharded_params import ShardedParam, sharded_params_in

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Other = Factory | Mapping[str, Factory] | None

RATIOS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
"""By `adjust_lr_fn`, by what the learning rate is multiplied for a matrix of some shape."""

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for sharded models, and another optimizer for parameters that are not matrices.

    Arguments and numbers are those of `torch.optim.Muon` on the whole model, which does not know of shards.
    Momentum is sharded as the parameters are. Each matrix goes to one rank, which orthogonalises its update,
    and the result comes back (see `owned_matrices`). Ranks share this work evenly, replicas too.

    The first of `param_groups` has the matrices; the groups of the others follow. If a model is wrapped
    without `use_orig_params`, they hold a piece of the `FlatParameter` for each original parameter. All of
    the state is in `state_dict()`, and, by names, in the state dicts of the wrapper and of
    `torch.distributed.checkpoint`; so it may be loaded at another number of ranks, and by a model that is
    sharded in another way.

    Making it is collective, and so is `step`.

    Args:
        model: Wrapped by `FullyShardedDataParallel`, sharded by `fully_shard`, or plain. Not its parameters:
            make it after wrapping.
        lr: Learning rate; a tensor of one element may be given.
        weight_decay: Decoupled; likewise for the default of `other`.
        momentum: Momentum of the average of gradients.
        nesterov: Whether the update looks a step ahead.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: Least norm by which a matrix is divided before it.
        ns_steps: Iterations.
        adjust_lr_fn: How the learning rate depends on a matrix' shape: "original" (the default),
            "match_rms_adamw", or "spectral_unclamped", which torch has from 2.15 on.
        other: Makes the optimizer of what is no matrix from a list of parameters, elementwise; a dict of such
            by name, as patterns of `fnmatch`, the first that fits. By default
            `torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)`.
        select: Which parameters are matrices to Muon, as for `owned_matrices`: by default those of two
            dimensions that are no embeddings. An output layer that is to be left out must be named.
        view: How parameters are cut into matrices, as for `owned_matrices`.
        ns_dtype: In which matrices travel and are orthogonalised; torch's does so in bf16.

    Attributes:
        matrices: The `OwnedMatrices`.
        others: The optimizers of all else; their groups and state are this one's.

    Raises:
        ValueError: If a number is negative, `adjust_lr_fn` is unknown, `ns_dtype` is not floating, a
            parameter that is no matrix fits none of the names in `other`, or as `owned_matrices`.
        TypeError: If `model` is no module, or `other` makes no optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        other: Other = None,
        select: Select = None,
        view: Views = None,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        _check(defaults, ns_dtype)
        self.matrices = owned_matrices(model, select=select, view=view)
        _refuse_complex(self.matrices)
        self._ns_dtype = ns_dtype
        self._shapes = _shapes_of(self.matrices.names, self.matrices.matrices)
        super().__init__([{"params": list(self.matrices.params)}], defaults)
        adamw = partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)
        matrices = {*self.matrices.names}
        rest = [sharded for sharded in sharded_params_in(model) if sharded.fqn not in matrices]
        self.others = _made(rest, other or adamw)
        for optimizer in self.others:
            self.param_groups.extend(optimizer.param_groups)
            self.state.update(optimizer.state)  # some make it at once, as Adagrad does
        note_knows_shards(self)
        self._pieces = [p for group in self.param_groups for p in group["params"] if isinstance(p, FlatPiece)]
        self._entries = 0  # of the state, when it was put in order

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups beside those of the model, which the optimizer has from the beginning.

        Args:
            param_group: The group.

        Raises:
            ValueError: Always, once it is made.
        """
        if self.param_groups:
            raise ValueError(
                "Muon has all parameters of its model since it was made: choose by select and other there, "
                "and make it anew for another model"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        """Refuses copies and pickles: this optimizer belongs to its model and to the model's ranks."""
        raise TypeError(
            "Muon cannot be copied or pickled: make one for the copied model, and load state_dict() into it"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; collective.

        Args:
            closure: Computes the loss anew, and gradients; called once.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: If some ranks have a gradient of a matrix and others have none, on all ranks and
                before anything changes; it names the parameter.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for piece in self._pieces:
            piece.follow()
        self._step_matrices(self.param_groups[0])
        first = 1
        for optimizer in self.others:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first:last], self.state
            optimizer.step()
            first = last
        if len(self.state) != self._entries:
            self._entries = len(self.state)
            put_in_order(self.state, [param for group in self.param_groups for param in group["params"]])
        increment_version([*{id(piece.flat): piece.flat for piece in self._pieces}.values()])
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        params: list[nn.Parameter] = group["params"]
        present = [param.grad is not None for param in params]
        of_model = self._has_matrices(params)
        active = self.matrices.agreed(present) if of_model else present
        chosen = [index for index, has_grad in enumerate(present) if has_grad and active[index]]
        updates: list[torch.Tensor | None] = [None] * len(params)
        for index, update in zip(chosen, self._averaged([params[index] for index in chosen], group)):
            updates[index] = update
        if of_model:
            self._apply(updates, active, group)

    def _has_matrices(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters for which it was made; refuses if only some are.

        State dict functions step a copy of the optimizer, of quite other parameters, to see what state it
        makes.
        """
        own = self.matrices.params
        if len(params) == len(own) and all(map(operator.is_, params, own)):
            return True
        if len(params) != len(own) or not {*map(id, params)}.isdisjoint(map(id, own)):
            raise RuntimeError(
                "the parameters of Muon's first group are others than when it was made: leave them there, "
                "and set the gradients of those to None that are not to be updated"
            )
        return False

    def _averaged(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Adds gradients to the momentum; returns this rank's parts of the updates, to be orthogonalised."""
        if not params:
            return []
        grads = [*map(_own_gradient, params)]
        for param, grad in zip(params, grads):
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = copyable(holding(param, torch.zeros_like(grad)))
        momentum = [to_local(self.state[param]["momentum_buffer"]) for param in params]
        foreach_lerp_(momentum, grads, 1 - group["momentum"])
        return foreach_lerp(grads, momentum, group["momentum"]) if group["nesterov"] else momentum

    def _apply(
        self, updates: Sequence[torch.Tensor | None], active: Sequence[bool], group: Mapping[str, Any]
    ) -> None:
        """Orthogonalises the updates, and applies them to the parameters."""
        ratio = RATIOS[group["adjust_lr_fn"]]
        ratios = [{ratio(*shape) for shape in shapes} for shapes in self._shapes]
        # Those whose matrices do not have one ratio between them.
        scaled = {name for name, values in zip(self.matrices.names, ratios) if len(values) > 1}

        def compute(stack: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
            orthogonal = orthogonalized(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
            factors = [ratio(*matrix.shape) if matrix.parameter in scaled else 1.0 for matrix in matrices]
            if any(factor != 1 for factor in factors):
                foreach_mul_([*orthogonal.unbind()], factors)
            return orthogonal

        results = self.matrices.compute(updates, active, compute, self._ns_dtype)
        lr = float(group["lr"])
        by_ratio: dict[float, list[int]] = {}
        for index, result in enumerate(results):
            if result is not None:
                by_ratio.setdefault(1.0 if len(ratios[index]) > 1 else min(ratios[index]), []).append(index)
        for factor, indices in by_ratio.items():
            held = [to_local(self.matrices.params[index].detach()) for index in indices]
            foreach_mul_(held, 1 - lr * group["weight_decay"])
            steps = [result for index in indices if (result := results[index]) is not None]
            foreach_add_(held, steps, alpha=-lr * factor)
        chosen = [self.matrices.params[index] for indices in by_ratio.values() for index in indices]
        increment_version([param for param in chosen if isinstance(param, DTensor)])


def _check(defaults: Mapping[str, Any], ns_dtype: torch.dtype) -> None:
    lr = defaults["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements; it must have one")
    for name in ("lr", "momentum", "weight_decay"):
        if not defaults[name] >= 0:
            raise ValueError(f"{name} must not be negative, and is {defaults[name]}")
    if not 0 <= defaults["ns_steps"] < 100:
        raise ValueError(f"ns_steps must be at least 0 and less than 100, and is {defaults['ns_steps']}")
    if len(defaults["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, not {defaults['ns_coefficients']}")
    if defaults["adjust_lr_fn"] not in RATIOS:
        known = ", ".join(repr(name) for name in RATIOS if name)
        raise ValueError(f"adjust_lr_fn must be one of {known}, or None, not {defaults['adjust_lr_fn']!r}")
    if not ns_dtype.is_floating_point:
        raise ValueError(f"ns_dtype must be a floating dtype, not {ns_dtype}")


def _refuse_complex(matrices: OwnedMatrices) -> None:
    for name, param in zip(matrices.names, matrices.params):
        if param.is_complex():
            raise ValueError(f"parameter '{name}' is complex, and Muon has no such: leave it out by select")


def _own_gradient(param: nn.Parameter) -> torch.Tensor:
    grad = as_placed(param) if isinstance(param, DTensor) else param.grad
    assert grad is not None
    return to_local(grad)


def _shapes_of(names: Sequence[str], matrices: Iterable[Matrix]) -> list[set[tuple[int, int]]]:
    shapes: dict[str, set[tuple[int, int]]] = {name: set() for name in names}
    for matrix in matrices:
        shapes[matrix.parameter].add(matrix.shape)
    return [*shapes.values()]


def _made(
    held: Sequence[ShardedParam], other: Factory | Mapping[str, Factory]
) -> list[torch.optim.Optimizer]:
    """Builds AdamW for parameters that are not matrices, where there are any."""
    if not isinstance(other, Mapping):
        return [_checked(other, held)] if held else []
    check_patterns(held, other, "other")
    chosen: dict[str, list[ShardedParam]] = {pattern: [] for pattern in other}
    for sharded in held:
        pattern = next((pattern for pattern in other if matches(sharded, [pattern])), None)
        if pattern is None:
            raise ValueError(
                f"parameter '{sharded.fqn}' of shape {tuple(sharded.shape)} is no matrix to Muon, and fits "
                f"none of {', '.join(map(repr, other))}: let other have an entry '*' for all that is left"
            )
        chosen[pattern].append(sharded)
    return [_checked(other[pattern], params) for pattern, params in chosen.items() if params]


def _checked(factory: Factory, held: Sequence[ShardedParam]) -> torch.optim.Optimizer:
    optimizer = factory([sharded.param for sharded in held])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"other must make a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    return on_shards(optimizer)
