"""The device on which a unit computes, with its streams and pinned host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._core.torch_private import symmetric_memory


class Accelerator:
    """An accelerator's streams, events and pinned host memory.

    Nothing else in the package asks torch for them, so that the test bed can put a simulation in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lanes: dict[str, Any] = {}  # from `lane_of`, by purpose
        self.monitor: Any = None  # from `monitor_of`

    def current_stream(self) -> torch.Stream:
        """Returns the stream on which the caller computes."""
        return torch.accelerator.current_stream(self._device)

    def record_time(self) -> Any:
        """Returns a timing event recorded on the current stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(self.current_stream())
        return event

    def new_stream(self, purpose: str) -> torch.Stream:
        """Returns a new stream; `purpose` is for messages."""
        return torch.Stream(self._device)

    def new_host_lane(self, in_a_thread: Callable[[], Any]) -> Any:
        """Returns a lane for work of the host beside the device: the one that the argument makes."""
        return in_a_thread()

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor in host memory; the device can copy from it if pinned."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in host memory."""
        return tensor.device.type == "cpu"

    @property
    def captures(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def prepare_to_ask(self) -> None:
        """Prepares a thread that only queries events, also while other threads capture graphs."""
        torch.accelerator.set_device_index(self._device.index)
        if self._device.type == "cuda":
            relaxed = ctypes.c_int(2)
            # Otherwise a question in this thread would end a capture in another one.
            with suppress(OSError, AttributeError):  # not NVIDIA's
                ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))

    def new_pool(self, allocator: Any) -> Any:
        """Returns a pool of the device's memory that grows by an allocator."""
        return torch.get_device_module(self._device).MemPool(allocator)

    def new_symmetric_pool(self) -> Any:
        """Returns a pool of NCCL's symmetric memory."""
        symmetric_memory.set_backend("NCCL")
        return symmetric_memory.get_mem_pool(self._device)

    def allocating_in(self, pool: Any) -> AbstractContextManager[object]:
        """Lets this thread allocate from a pool while the context is open."""
        context: AbstractContextManager[object] = torch.get_device_module(self._device).use_mem_pool(pool)
        return context

    def meet_in_symmetric_memory(self, tensor: torch.Tensor, group_name: str) -> None:
        """Lets the ranks of a group reach each other's tensor; collective where its memory is new."""
        symmetric_memory.rendezvous(tensor, group=group_name)  # type: ignore[arg-type]  # `str`, by its docs

    def beside(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in the memory of another one; the host may read it if that is host memory."""
        return tensor.to(other.device)


_real = lru_cache(Accelerator)
_simulated: Callable[[], Accelerator | None] | None = None
"""Returns what stands for an accelerator over the CPU's memory, in the calling thread; None for nothing."""
_planned: tuple[str, Accelerator | None] | None = None


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Returns the accelerator of a device; None for the CPU, unless one is simulated there."""
    if _planned is not None:
        return None if device.type == "cpu" else _planned[1]
    if device.type != "cpu":
        return _real(device)
    return None if _simulated is None else _simulated()


@contextmanager
def planning_for(device_type: str, accelerator: Accelerator | None) -> Iterator[None]:
    """Pretends that this process has one device of a type, "cpu" for none, while the context is open."""
    global _planned
    before, _planned = _planned, (device_type, accelerator)
    try:
        yield
    finally:
        _planned = before


def resolve_device(
    tensors: Iterable[tuple[str, torch.Tensor]],
    device_id: int | torch.device | None,
    groups: Iterable[dist.ProcessGroup],
) -> torch.device:
    """Chooses where a unit computes.

    `device_id` decides if given; otherwise the device of the tensors. Tensors on the CPU go to the current
    accelerator where the groups cannot communicate from the CPU (NCCL alone). If all are on the meta
    device, they go there too, provided that the groups can communicate from it. Raises a ValueError where
    tensors are spread over devices or contradict `device_id`, or where that device is not there.
    """
    by_device: dict[torch.device, str] = {}
    for name, tensor in tensors:
        by_device.setdefault(tensor.device, name)
    only_meta = set(by_device) == {torch.device("meta")}
    by_device.pop(torch.device("meta"), None)
    if device_id is None:
        if len(by_device) > 1:
            places = ", ".join(f"'{name}' on {device}" for device, name in by_device.items())
            raise ValueError(f"all tensors of a unit must be on one device, but {places}; pass device_id")
        device = next(iter(by_device), torch.device("cpu"))
        # Without a group, as where something stands in for it, nothing has to travel.
        known, accelerator = _device_types(groups) or {"cpu"}, _accelerator_type()
        leaves_the_cpu = "cpu" not in known or (only_meta and accelerator in known)
        return _complete(torch.device(accelerator)) if device.type == "cpu" and leaves_the_cpu else device
    wanted = _named(device_id, "device_id")
    for device, name in by_device.items():
        if device.type != "cpu" and device != wanted:
            raise ValueError(f"device_id is {wanted}, but '{name}' is on {device}; change one of the two")
    return wanted


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device in a mesh; raises a ValueError if it is not there."""
    return _named(mesh.device_type, "mesh")


def device_type_for(group: dist.ProcessGroup) -> str:
    """Returns the accelerator's type if a group can communicate from it, else "cpu"."""
    accelerator = _accelerator_type()
    return accelerator if accelerator in _device_types([group]) else "cpu"


def check_present(device: torch.device, argument: str) -> None:
    """Raises a ValueError if this process does not have the device that an argument names."""
    there = _accelerator_type()
    fitting = device.type == there != "cpu"
    count = (1 if _planned else torch.accelerator.device_count()) if fitting else 0
    if device.type == "cpu" or (count and (device.index is None or device.index < count)):
        return
    if there == "cpu":
        present, choice = "no accelerator", "'cpu'"
    elif device.type != there:
        present, choice = f"'{there}' but not '{device.type}'", f"'{there}' or 'cpu'"
    else:
        present, choice = f"{count} of type '{there}'", f"one from '{there}:0' to '{there}:{count - 1}'"
    place = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
    raise ValueError(
        f"{argument} names the device '{device}', which is not there: {place} finds {present} "
        f"(torch.accelerator); {argument} must name {choice}"
    )


def _named(wanted: int | torch.device | str, argument: str) -> torch.device:
    """Completes the device that an argument names; a number is an accelerator's index."""
    if isinstance(wanted, int) and _planned is None and accelerator_of(torch.device("cpu")) is None:
        _require_accelerator(wanted, argument)
    device = torch.device(_accelerator_type(), wanted) if isinstance(wanted, int) else torch.device(wanted)
    check_present(device, argument)
    return _complete(device)


def _require_accelerator(index: int, argument: str) -> None:
    """Raises a ValueError where there is no accelerator that an index could mean."""
    if _accelerator_type() == "cpu":
        place = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise ValueError(
            f"{argument}={index} is the number of an accelerator, and {place} finds none "
            f"(torch.accelerator): leave {argument} out, or pass torch.device('cpu')"
        )


def _complete(device: torch.device) -> torch.device:
    """Adds the current index to an accelerator without one."""
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" compares unequal to the device of tensors
    if device.index is not None:
        return device
    return torch.device(device.type, 0 if _planned else torch.accelerator.current_device_index())


def _accelerator_type() -> str:
    if _planned is not None:
        return _planned[0]
    # Without the check it is the one that torch was compiled for, also where there is none.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _device_types(groups: Iterable[dist.ProcessGroup]) -> set[str]:
    return {device.type for group in groups for device in group._device_types}
