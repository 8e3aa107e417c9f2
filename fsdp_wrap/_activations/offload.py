"""`offload_activations`: tensors that autograd saves go to host memory, and come back for their backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_wrap._activations.storages import Bundle, CopiesToHost, SavedStorage
from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import refuse_unsharded
from fsdp_wrap._comm import Accelerator, accelerator_of
from fsdp_wrap._core import Computing, PlugIn, Precedence, everywhere, warn_caller
from fsdp_wrap._core.torch_private import graph_task, top_saved_tensors_hooks
from fsdp_wrap._params import to_local
from fsdp_wrap._runtime import Unit, step_of, units_in

_LEAST = 1 << 20


class ActivationOffload:
    """The offload of a model's activations, until `remove`."""

    def __init__(self, savers: Sequence[_Saver] = ()) -> None:
        self._savers = savers

    @property
    def nbytes(self) -> int:
        """Bytes that have gone to host memory so far, on this rank."""
        return sum(saver.nbytes for saver in self._savers)

    def remove(self) -> None:
        """Lets activations stay on the device again, from the next forward on."""
        for saver in self._savers:
            saver.remove()


def offload_activations(
    model: nn.Module, units: Sequence[str] | None = None, *, keep: int = 1, min_bytes: int = _LEAST
) -> ActivationOffload:
    """Moves what autograd saves to pinned host memory between forward and backward.

    A unit's activations leave the device, on a stream of their own, while the next unit computes. They come
    back while the backward of the unit after it runs. With `torch.utils.checkpoint` around or inside
    units, these are the inputs of the checkpoints. Parameters and buffers stay where they are, and so do
    tensors that the program holds. A storage travels once, whatever number of tensors share it. Activations
    of the last units stay, since their backward comes at once.

    The numbers are the same bits. Nothing is communicated, so ranks may differ in it.

    Args:
        model: Wrapped or sharded, or with such modules inside.
        units: Names of the units whose activations travel, "" for the root; None for all.
        keep: For how many units' forwards a unit's activations stay on the device after their copy was
            issued. More leave a slow bus more time, and take more memory.
        min_bytes: Storages of fewer bytes stay on the device.

    Returns:
        An `ActivationOffload`. Without an accelerator it does nothing, and a warning says so.

    Raises:
        ValueError: If nothing in the model is wrapped or sharded, a name is unknown, `keep` or `min_bytes` is
            negative, or the activations of a unit are offloaded already.
        RuntimeError: Inside a forward or backward.
    """
    for name, number in (("keep", keep), ("min_bytes", min_bytes)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name}={number!r} must be a whole number that is not negative")
    by_name = units_in(model)
    if not by_name:
        refuse_unsharded(model, "offload_activations()")
    unknown = [name for name in units or () if name not in by_name]
    if unknown:
        raise ValueError(f"{unknown} are no units of this {type(model).__name__}, which has {[*by_name]}")
    distinct = [*dict.fromkeys(by_name.values())]
    require_idle(distinct, "offload_activations()")
    for unit in distinct:
        if unit in _offloaded:
            raise ValueError(f"the activations of {unit.name} are offloaded already: call remove() first")
    chosen = distinct if units is None else [by_name[name] for name in units]
    by_device: dict[torch.device, list[Unit]] = {}
    for unit in distinct:
        by_device.setdefault(step_of(unit).device, []).append(unit)
    savers = [
        _Saver(accelerator, device, of_device, chosen, keep, min_bytes)
        for device, of_device in by_device.items()
        if (accelerator := accelerator_of(device)) is not None
    ]
    if not savers:
        warn_caller(
            "offload_activations() does nothing: this model computes in host memory, where its activations "
            "are already"
        )
    return ActivationOffload(savers)


class _SavedTensor(NamedTuple):
    """A tensor that autograd saved, as a part of its storage.

    Attributes:
        version: The tensor's version counter when it was saved.
        place: Size, stride and offset in the storage.
    """

    storage: SavedStorage
    bundle: Bundle
    version: int
    dtype: torch.dtype
    place: tuple[torch.Size, tuple[int, ...], int]


_Packed = _SavedTensor | tuple[torch.Tensor, int]
"""A part of a storage that may travel, or a tensor that stays, with its version."""


class _Saver(PlugIn):
    """Sees what autograd saves in the forwards of some units, and lets it travel."""

    order = Precedence.SAVED

    def __init__(
        self,
        accelerator: Accelerator,
        device: torch.device,
        units: Sequence[Unit],
        chosen: Collection[Unit],
        keep: int,
        least: int,
    ) -> None:
        self.accelerator, self._device, self._keep, self._least = accelerator, device, keep, least
        self._travels = weakref.WeakKeyDictionary({unit: unit in chosen for unit in units})
        self._undo: weakref.WeakKeyDictionary[Unit, list[ExitStack]] = weakref.WeakKeyDictionary()
        self.nbytes = 0
        self._turn = 0
        self._running: list[tuple[Unit, bool]] = []  # units in their forwards, and whether they are chosen
        self._staying: set[int] = set()  # addresses of storages of parameters and buffers
        self._known: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._bundle = Bundle(units[0])
        self._here: list[weakref.ref[Bundle]] = []  # with storages that have not left
        self._leaving: deque[CopiesToHost] = deque()
        _offloaded.update(units)
        everywhere.attach(self)
        weakref.finalize(units[0].module, self.remove).atexit = False

    def remove(self) -> None:
        """Leaves the units, if it has not yet."""
        if self in everywhere.attached:
            everywhere.detach(self)
        _offloaded.difference_update(self._travels)

    # forward

    def runs(self, unit: Unit, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if unit not in self._travels:
            return
        undo = ExitStack()
        self._undo.setdefault(unit, []).append(undo)
        # A recomputation saves for a backward that runs already.
        if graph_task() != -1 or self.accelerator.captures:
            return
        self._enter(unit)
        undo.callback(self._leave)
        if top_saved_tensors_hooks(True) is None:  # else ours, or a checkpoint's, which decides by itself
            undo.enter_context(saved_tensors_hooks(self.pack, self.unpack))

    def computed(self, unit: Unit, what: Computing) -> None:
        if self._undo.get(unit):
            self._undo[unit].pop().close()

    def _enter(self, unit: Unit) -> None:
        if not self._running:
            self._staying = {*self._addresses()}
        else:  # its leaves may have got other memory
            self._staying.update(_addresses_of(unit))
        self._advance()
        self._running.append((unit, self._travels[unit]))
        self._next_bundle()

    def _leave(self) -> None:
        self._running.pop()
        self._next_bundle()

    def _addresses(self) -> Iterator[int]:
        for unit in [*self._travels]:
            yield from _addresses_of(unit)
            yield from (buffer.untyped_storage()._cdata for buffer in unit.module.buffers())

    def _next_bundle(self) -> None:
        if not self._bundle.is_empty:
            self._here.append(weakref.ref(self._bundle))
        if self._running:
            before = self._bundle.before if self._bundle.is_empty else self._bundle
            self._bundle = Bundle(self._running[-1][0], before)

    def _advance(self) -> None:
        """Copies what nothing but autograd holds by now, and frees what was copied before."""
        self._turn += 1
        bundles = [bundle for reference in self._here if (bundle := reference()) is not None]
        for bundle in bundles:
            before = bundle.nbytes
            self._leaving += bundle.send(self.accelerator, self._turn)
            self.nbytes += bundle.nbytes - before
        self._here = [weakref.ref(bundle) for bundle in bundles if not bundle.has_left]
        while self._leaving and self._leaving[0].turn <= self._turn - self._keep:
            self._leaving.popleft().end()

    # autograd

    def pack(self, tensor: torch.Tensor) -> _Packed:
        """Returns what autograd keeps in the place of a tensor."""
        if not self._running[-1][1] or self._stays(tensor):
            # A node must not keep an output of its own: that would be a cycle.
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        address = tensor.untyped_storage()._cdata
        storage = self._known.get(address)
        is_new = storage is None or not storage.is_at(address)
        if storage is None or is_new:
            storage = self._known[address] = SavedStorage(tensor)
        self._bundle.add(storage, is_new)
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _SavedTensor(storage, self._bundle, tensor._version, tensor.dtype, place)

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stays on the device in any case."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return True
        storage = tensor.untyped_storage()  # which a view would keep as a whole
        small = storage.nbytes() < self._least
        return small or storage._cdata in self._staying or self.accelerator.is_on_host(tensor)

    def unpack(self, packed: _Packed) -> torch.Tensor:
        """Returns a saved tensor, on the device."""
        if not isinstance(packed, _SavedTensor):
            tensor, version = packed
            if tensor._version != version:
                raise _edited(tensor.shape)
            return tensor
        storage = packed.storage
        packed.bundle.bring(self.accelerator, self._device, storage)
        if storage.version != packed.version:
            raise _edited(packed.place[0])
        flat = storage.on_device()
        return (flat if flat.dtype is packed.dtype else flat.view(packed.dtype)).as_strided(*packed.place)


_offloaded: weakref.WeakSet[Unit] = weakref.WeakSet()


def _addresses_of(unit: Unit) -> Iterator[int]:
    leaves = (leaf for segment in unit.segments for leaf in segment.leaves)
    return (to_local(leaf).untyped_storage()._cdata for leaf in leaves)


def _edited(shape: Sequence[int]) -> RuntimeError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that autograd had saved for a backward was modified by an "
        f"inplace operation on rank {rank}: the values that its gradients need are gone. Compute out of "
        "place, or clone the tensor first"
    )
