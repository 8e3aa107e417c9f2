"""Fault-tolerant replica groups: torchft's manager as the replicate dimension of a sharded model.

Each replica group holds one copy of the model, sharded over its own ranks by either front-end, with process
groups of its own. A hybrid mesh sums gradients over fixed replicas; torchft's manager averages them over the
groups of the current step. A returning group receives its shards from a living group, rank by rank, without
a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._custom_comms import hook_reductions
from fsdp_wrap._params import holding, to_local
from fsdp_wrap._runtime import units_in

__all__ = ["ReplicaManager", "join_replica_groups"]


class ReplicaManager(Protocol):
    """The interface of `torchft.Manager` that `join_replica_groups` needs."""

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Averages a tensor in place over the groups of this step; returns a work.

        Args:
            tensor: The tensor, of any shape.
        """

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Registers the functions that load and return state for a returning group.

        Args:
            key: Name of the state.
            load_state_dict: Takes the state that another group has sent.
            state_dict: Returns the state to send.
        """


def join_replica_groups(
    manager: ReplicaManager,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    average_gradients: bool = True,
) -> None:
    """Makes a sharded model one of several copies, kept equal by a manager while groups join and leave.

    After each reduction within the group, the manager averages this rank's shard over all groups of the step.
    To heal a returning group, it sends this rank's shards of parameters, buffers and optimizer state to the
    rank of the same number. No tensor is gathered. Call this once, after sharding and after the optimizer was
    made. All groups must shard in the same way, over equally many ranks.

    Step by `torchft.Optimizer(manager, optimizer)`. It begins a step with the living groups, and skips an
    update that not all ranks of the group can commit. `torchft.local_sgd.LocalSGD` and `DiLoCo` average
    parameters themselves: pass `average_gradients=False` with them.

    Args:
        manager: A `torchft.Manager`, or an object with its `allreduce` and `register_state_dict_fn`.
        model: A model sharded by the wrapper or `fully_shard`.
        optimizer: The optimizer of the model's parameters.
        average_gradients: Whether gradients are averaged over groups in each backward that reduces.

    Raises:
        ValueError: If no module of the model is sharded.
        RuntimeError: If reductions of the model have a hook already.
    """
    units = [member for unit in units_in(model).values() for member in unit.over_all_meshes]
    if not units:
        raise ValueError(
            f"no module of {type(model).__name__} is sharded: shard it by fully_shard or the wrapper before "
            "it joins replica groups"
        )
    for unit in units if average_gradients else ():
        if unit.plug_ins.averaged:
            raise RuntimeError(
                f"reductions of {unit.name} have a hook already: call set_all_reduce_hook(None) first, or "
                "join replica groups only once"
            )
    state = _ReplicaState(model, optimizer)
    manager.register_state_dict_fn("fsdp_wrap", state.load_state_dict, state.state_dict)

    def average(reduced: torch.Tensor) -> None:
        manager.allreduce(reduced).wait()

    for unit in units if average_gradients else ():
        hook_reductions(unit, average, None, notes=True)


class _ReplicaState:
    """This rank's shards of model and optimizer, as plain tensors.

    Parameters are looked up once, since modules show full ones while a forward runs in another thread.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns all state without copies, in the memory of model and optimizer."""
        optim = self._optimizer.state_dict()
        entries = optim["state"]
        sharded = [(n, key) for n in entries for key, own in entries[n].items() if isinstance(own, DTensor)]
        state = {n: {key: _own(value) for key, value in entry.items()} for n, entry in entries.items()}
        model = {name: _own(tensor) for name, tensor in self._tensors.items()}
        return {"model": model, "optim": {**optim, "state": state}, "sharded": sharded}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of another group's rank; a different sharding is refused before any change."""
        for name, tensor in self._tensors.items():
            theirs = state["model"].get(name)
            if theirs is None or theirs.shape != _own(tensor).shape:
                there = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
                raise ValueError(
                    f"replica groups must shard alike, but of {name} this rank holds shape "
                    f"{tuple(_own(tensor).shape)} and the living group's sends {there}"
                )
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        optim = {**state["optim"], "state": {n: dict(entry) for n, entry in state["optim"]["state"].items()}}
        for number, key in state["sharded"]:
            entry = optim["state"][number]
            entry[key] = holding(params[number], entry[key].to(params[number].device))
        self._optimizer.load_state_dict(optim)
        for name, tensor in self._tensors.items():
            _own(tensor).copy_(state["model"][name])


def _own(value: Any) -> Any:
    """Returns a tensor's local part; other values as they are."""
    return to_local(value).detach() if isinstance(value, torch.Tensor) else value
