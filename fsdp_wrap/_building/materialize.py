"""Materialisation: initialises a unit's meta tensors, and broadcasts tensors.

A tensor that leaves the meta device stays the same Python object. So ties and attributes stay, and a
parameter that was ignored, or left to another unit, is still found as such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import Communicator, all_gather_object
from fsdp_wrap._core import UnitContents, children_first, joined, replace_tensor
from fsdp_wrap._core.torch_private import swap_tensor_impl
from fsdp_wrap._params import inner_tensors, tensors_beside, to_local

_MESSAGE_BYTES = 32 << 20
"""Largest message of `broadcast`."""

_Named = tuple[str, torch.Tensor]


class MaterializationError(RuntimeError):
    """A `param_init_fn` that left tensors on the meta device, or changed their class."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """The source of initial values: `param_init_fn`, `reset_parameters`, or the first rank."""

    param_init_fn: Callable[[nn.Module], Any] | None  # None for the modules' `reset_parameters`
    synchronised: bool  # whether the first rank's values overwrite all tensors, of any device
    first: bool  # whether this is the first rank

    @property
    def received(self) -> bool:
        """Whether this rank receives all values, and so initialises nothing."""
        return self.synchronised and not self.first


def refuse_together(error: Exception | None, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raises on ranks without an error if another rank has one, since they would wait for it; collective."""
    seen = None if error is None else f"on rank {dist.get_rank()}, {error}"
    for group in groups:
        seen = next((refusal for refusal in all_gather_object(seen, group) if refusal is not None), None)
    if error is None and seen is not None:
        raise ValueError(f"nothing was wrapped on this rank, since another one refused its module: {seen}")


def materialize(
    contents: UnitContents,
    values: Values,
    device: torch.device,
    stand_ins: Mapping[torch.Tensor, nn.Parameter],
) -> None:
    """Gives memory and values to the unit's tensors on the meta device; leaves all others as they are.

    Children come before parents, as in `torch.nn.Module.apply`. A shared parameter gets its values from the
    first of its modules. Initialising functions see `stand_ins` in the place of parameters that other units
    have sharded.
    """
    with torch.inference_mode(False), torch.no_grad():
        if values.received:
            _allocate((tensor for _, tensor in contents.tensors()), device)
        else:
            for fqn, module, initialise in _initialisers(contents, values.param_init_fn, device):
                _initialise(fqn, module, initialise, stand_ins)
    left = ", ".join(f"'{fqn}'" for fqn, tensor in contents.tensors() if tensor.is_meta)
    if left:
        raise MaterializationError(
            f"still on the meta device after initialisation: {left}; param_init_fn(module) must materialise "
            "all that a module holds directly (module.to_empty(device=..., recurse=False)) and initialise it"
        )


def broadcast(
    named: Sequence[_Named], steps: Sequence[Communicator], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Overwrites tensors of any dtype with the first rank's, in messages of bounded size; collective.

    The communicators in `steps` broadcast one after the other: to one rank of every copy, then within the
    copies. Names, shapes or dtypes that differ between ranks raise an error on every rank.
    """
    inner = [pair for fqn, tensor in named for pair in inner_tensors(fqn, tensor)]
    named = inner + [pair for fqn, tensor in named for pair in tensors_beside(fqn, tensor)]
    _check_same(named, groups)
    for _, tensor in named:
        target = to_local(tensor).detach()
        travelling = target.resolve_conj().resolve_neg().contiguous()
        # Bytes, since backends support few dtypes.
        data = travelling.reshape(-1).view(torch.uint8)
        for message in torch.split(data, _MESSAGE_BYTES) if data.numel() else ():
            for communicator in steps:
                communicator.broadcast(message)
        if travelling.data_ptr() != target.data_ptr():
            target.copy_(travelling)


def _check_same(named: Sequence[_Named], groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuses names, shapes or dtypes that differ between ranks: a broadcast would mix tensors or abort."""
    own = [_describe(fqn, tensor) for fqn, tensor in named]
    digests = {hashlib.blake2b("\n".join(own).encode(), digest_size=16).digest()}
    for group in groups:
        digests = set().union(*all_gather_object(digests, group))
    if len(digests) <= 1:
        return
    expected = own
    for group in reversed(groups):  # the first rank's, to one rank of every copy, then to the others
        expected = all_gather_object(expected, group)[0]
    differing = next(((a, b) for a, b in zip_longest(own, expected, fillvalue="nothing") if a != b), None)
    here = f"rank {dist.get_rank()} has {differing[0]}, the first {differing[1]}" if differing else ""
    raise ValueError(
        "sync_module_states needs the same parameters and buffers on all ranks, but they differ: "
        + (here or "those of some rank from this one's; see the errors of the other ranks")
    )


def _describe(fqn: str, tensor: torch.Tensor) -> str:
    kind = "trainable" if tensor.requires_grad else "fixed"
    return f"'{fqn}' ({kind}, shape {tuple(tensor.shape)}, {tensor.dtype})"


def direct_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a module itself."""
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _initialisers(
    contents: UnitContents, function: Callable[[nn.Module], Any] | None, device: torch.device
) -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """Yields the unit's modules to initialise, children first, each with its name and initialiser."""
    touched: set[nn.Module] = set()
    for fqn, module in children_first(contents.modules):
        wanted = (
            tensor for tensor in direct_tensors(module).values() if tensor not in contents.ignored.params
        )
        meta = [tensor for tensor in wanted if tensor.is_meta]
        reset = reset_method(module)
        if function is not None and (meta or not touched.isdisjoint(module.children())):
            touched.add(module)  # then its parents too, which may adjust their children's values
            yield fqn, module, partial(function, module)
        elif function is None and meta and reset is not None:
            yield fqn, module, partial(_allocate_and_reset, meta, device, reset)


def _initialise(
    fqn: str, module: nn.Module, initialise: Callable[[], Any], stand_ins: Mapping[torch.Tensor, nn.Parameter]
) -> None:
    """Initialises the tensors that a module holds directly; tensors with values keep them."""
    before = direct_tensors(module)
    borrowed = {name: tensor for name, tensor in before.items() if tensor in stand_ins}
    empty = {tensor for tensor in before.values() if tensor.is_meta}
    real = (tensor for tensor in before.values() if tensor not in empty and tensor not in stand_ins)
    kept = [(tensor, tensor.clone()) for tensor in real]
    try:
        for name, param in borrowed.items():
            replace_tensor(module, name, stand_ins[param])
        initialise()
    finally:
        for name, param in borrowed.items():
            replace_tensor(module, name, param)
    for name, made in direct_tensors(module).items():
        tensor = before.get(name, made)
        if type(tensor) is not type(made):
            raise MaterializationError(
                f"initialisation made '{joined(fqn, name)}' a {type(made).__name__}, whose behaviour "
                f"sharding would lose; it must stay a {type(tensor).__name__}"
            )
        if tensor is not made:  # the earlier objects stay
            if tensor in empty:
                empty.remove(tensor)  # the first of several names counts
                _become(tensor, made)
            replace_tensor(module, name, tensor)
    for tensor, value in kept:
        tensor.data = value


def _become(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Gives a tensor object the contents of another, which must not be used afterwards."""
    requires_grad = tensor.requires_grad and replacement.requires_grad
    swap_tensor_impl(tensor, replacement)
    tensor.requires_grad_(requires_grad)
    tensor.__dict__.update(replacement.__dict__)


def _allocate(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=device)
            _become(tensor, empty.requires_grad_(tensor.requires_grad))


def _allocate_and_reset(meta: Iterable[torch.Tensor], device: torch.device, reset: Callable[[], Any]) -> None:
    _allocate(meta, device)
    reset()


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    names = "reset_parameters", "_reset_parameters"  # the latter in nn.MultiheadAttention
    return next(filter(callable, (getattr(module, name, None) for name in names)), None)
