"""`Simulation`: one rank's accelerator that exists in name only.

Tensors lie in the CPU's memory, and every operator runs at once, in the order of the program. Beside that the
simulation notes on which stream the operator would have run, what it would have come after, and which bytes
it touches. From these notes it tells what an accelerator might have done in another order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves

from bed.accelerator.memory import Action, Block, Region, conflicts, intervals_of
from bed.accelerator.operators import Call
from bed.accelerator.replay import Part, Recording, bytes_of, poison
from bed.accelerator.streams import HOST, Clock, Event, Stream, join
from fsdp_wrap._comm.device import Accelerator, simulating
from fsdp_wrap._core import Phase
from fsdp_wrap._runtime.unit import Unit

_HOST_READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}


class Simulation(Accelerator):
    """The streams, the memory and the host of one rank.

    Attributes:
        faults: What it objects to.
        host_waits: What the host waited for: by what, and where.
        actions: All that was done, in the order of the program.
        group_has_stream: Whether process groups run collectives on a stream of their own.
        recording: What can be done again in another order, if that was asked for.

    Args:
        records: Whether it is.
    """

    _of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self, records: bool = False) -> None:
        self.faults: list[str] = []
        self.host_waits: list[str] = []
        super().__init__(torch.device("cpu"))
        self.group_has_stream = False
        self.actions: list[Action] = []
        self.recording = Recording(self._block) if records else None
        self._host_clock: Clock = {}
        self._ticks: Clock = {}
        self._current: list[Stream] = []
        self._streams: dict[str, Stream] = {}
        self._blocks: dict[int, Block] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        self._active = self._aside = False
        self._dropped: list[Block] = []
        self._live: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._waits_before = 0
        self._unit = "no unit"
        self.compute = self.stream("compute")
        self._current.append(self.compute)

    @classmethod
    def here(cls) -> Simulation | None:
        """The one of the thread that asks, if it is in use."""
        found: Simulation | None = getattr(cls._of_thread, "simulation", None)
        return found

    @contextmanager
    def use(self) -> Iterator[Simulation]:
        """Lets this thread's operators run on it."""
        self._of_thread.simulation = self
        self._active = True
        try:
            with _Functions(self), _Operators(self):
                yield self
        finally:
            self._active = False
            self._of_thread.simulation = None
            if self.recording is not None:
                storages = [(self._blocks[number], found()) for number, found in self._storages.items()]
                self.recording.end([(block, each) for block, each in storages if each is not None])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Lets what only looks, and what has nothing to do with the device, go unnoticed."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @property
    def is_aside(self) -> bool:
        return self._aside

    def end_step(self) -> tuple[list[str], dict[str, int]]:
        """Returns what the host waited for since the last call, and the peak bytes by stream."""
        waits, self._waits_before = self.host_waits[self._waits_before :], len(self.host_waits)
        peaks, self._peaks = dict(self._peaks), Counter(self._live)
        return waits, peaks

    # what the package asks for

    def stream(self, name: str) -> Stream:
        """Returns one of this name."""
        if name not in self._streams:
            self._streams[name] = Stream(name, self._current, self.host_waits_for)
        return self._streams[name]

    def current_stream(self) -> Any:
        return self._current[-1]

    def new_stream(self, purpose: str) -> Any:
        return self.stream(purpose)

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(numel, dtype=dtype)
            poison(tensor.untyped_storage())
        self._new_block(tensor.untyped_storage(), HOST, pin)
        return tensor

    def beside(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.fetched(tensor) if self._block(other).on_host else tensor

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in host memory, for which the host waits, of what is on the device."""
        if self._block(tensor).on_host:
            return tensor
        copied = self.empty_on_host(tensor.numel(), tensor.dtype, pin=False).view(tensor.shape)
        return copied.copy_(tensor.detach())

    def lies_on_host(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor which was made just now lies in host memory."""
        block = self._block(tensor)
        self._live[block.queue] -= block.held
        block.queue = HOST

    # what is noted

    def host_waits_for(self, clock: Clock, what: str) -> None:
        """Notes that the host waits for something."""
        join(self._host_clock, clock)
        self.host_waits.append(f"{what} ({self._where()})")

    def act(
        self,
        what: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        queue: str | None = None,
    ) -> Action:
        """Notes one action, on the current stream if no other queue is given."""
        self._free_dropped()
        return self._act(what, [*map(self._region, reads)], [*map(self._region, writes)], queue)

    def _free_dropped(self) -> None:
        while self._dropped:
            self._free(self._dropped.pop(0))

    def _act(self, what: str, reads: list[Region], writes: list[Region], queue: str | None = None) -> Action:
        stream = self._current[-1]
        clock = self._host_clock if queue == HOST else stream.clock
        queue = queue or stream.name
        join(clock, self._host_clock)  # it was issued after what the host has seen
        tick = self._ticks[queue] = clock[queue] = self._ticks.get(queue, 0) + 1
        action = Action(what, self._where(), queue, tick, dict(clock), reads, writes)
        self.actions.append(action)
        if self.recording is not None:
            self.recording.queues[queue].append(action)
        self.faults += conflicts(action)
        return action

    def note_call(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Runs an operator, and notes it."""
        given = [self._block(each) for each in call.given]
        arguments = None if self.recording is None else self.recording.describe((args, kwargs))
        result = call.operator(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        known = {each.untyped_storage()._cdata for each in call.given}
        real = [each for each in outputs if each.untyped_storage().device.type == "cpu"]  # not a fake one
        fresh = [each for each in real if each.untyped_storage()._cdata not in known]
        tells = call.tells_the_host(result)
        if not (fresh or call.written or tells):
            return result  # a view
        on_host = bool(given) and all(block.on_host for block in given)
        for each in fresh:
            self._new_block(each.untyped_storage(), HOST if on_host else self._current[-1].name)
            if call.leaves_undefined:
                poison(each.untyped_storage())
        if call.name in ("aten::copy_", "aten::_foreach_copy_") and not on_host:
            on_host = all(self._block(each).on_host for each in call.written + call.read)
        action = self.act(call.name, call.read, [*call.written, *fresh], HOST if on_host else None)
        if self.recording is not None:
            self.recording.add_call(action, call, arguments, result, fresh)
        self._note_host(call, args, kwargs, tells and not on_host)
        return result

    def _note_host(self, call: Call, args: Any, kwargs: Any, tells: bool) -> None:
        """Notes where the host waits for an operator on the device."""
        stream = self._current[-1]
        if tells:
            self.host_waits_for(stream.clock, call.name)
            return
        of_host = [self._block(each) for each in call.given if each.dim() and self._block(each).on_host]
        if not of_host or all(self._block(each).on_host for each in call.given):
            return
        if "copy" not in call.name:
            self.faults.append(f"{call.name} ({self._where()}) mixes memory of the host and of the device")
        later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not later or not all(block.pinned for block in of_host):
            way = "to" if any(self._block(each).on_host for each in call.written) else "from"
            self.host_waits_for(stream.clock, f"{call.name} {way} the host")

    def collective(self, what: str, part: Part, reads: Any, writes: Any) -> Event:
        """Notes this rank's part in a collective; returns what tells that it is over."""
        if self.recording is not None:
            part.data = self.recording.describe(part.data)
        stream = self.current_stream()
        if self.group_has_stream:
            before, stream = stream, self.stream("group")
            stream.wait_stream(before)
        with stream:
            action = self.act(what, reads, writes)
        if self.recording is not None:
            self.recording.parts[action] = part
        return stream.record_event()

    def read_by_host(self, tensor: torch.Tensor, what: str) -> None:
        """Notes that the host looks at a tensor's numbers."""
        on_host = self._block(tensor).on_host
        action = self.act(what, [tensor], [], HOST if on_host else None)
        if not on_host:
            self.host_waits_for(self._current[-1].clock, what)
        if self.recording is not None:
            with self.aside():
                self.recording.add_read(action, tensor)

    # memory

    def _block(self, tensor: torch.Tensor) -> Block:
        return self._block_at(tensor.untyped_storage())

    def _block_at(self, storage: torch.UntypedStorage) -> Block:
        block = self._blocks.get(id(storage))
        if block is None:  # it was there before
            block = self._new_block(storage, self.compute.name)
            if self.recording is not None:
                block.initial = bytes_of(storage.clone())
        return block

    def _region(self, tensor: torch.Tensor) -> Region:
        return Region(self._block(tensor), intervals_of(tensor))

    def _new_block(self, storage: torch.UntypedStorage, queue: str, pinned: bool = False) -> Block:
        if id(storage) not in self._blocks:
            weakref.finalize(storage, self._forget, id(storage)).atexit = False
            self._storages[id(storage)] = weakref.ref(storage)
        self._count += 1
        block = self._blocks[id(storage)] = Block(self._count, storage.nbytes(), queue, pinned)
        if queue != HOST:
            self._live[queue] += block.held
            self._peaks[queue] = max(self._peaks[queue], self._live[queue])
        return block

    def _forget(self, number: int) -> None:
        block = self._blocks.pop(number)
        del self._storages[number]
        if not self._active or block.freed is not None:
            return
        if Simulation.here() is self:
            self._free(block)
        else:  # another rank's thread collects garbage
            self._dropped.append(block)

    def _free(self, block: Block) -> None:
        """Gives memory back to the allocator, which may let the next in its queue have it at once."""
        if block.on_host:
            return  # whose allocator waits for copies in flight
        self._live[block.queue] -= block.held
        region = Region(block, [(0, block.nbytes)] if block.nbytes else [])
        with self._streams[block.queue]:
            block.freed = self._act("free", [], [region])
        if self.recording is not None:
            self.recording.add_free(block.freed, block)

    def resized(self, storage: torch.UntypedStorage, nbytes: int, resize: Callable[[int], Any]) -> Any:
        """Resizes a storage, and notes that its memory goes, or that other memory comes."""
        block = self._block_at(storage)
        if storage.nbytes() == nbytes:
            return resize(nbytes)
        if block.freed is None:
            self._free(block)
        result = resize(nbytes)
        if nbytes:
            poison(storage)
            self._new_block(storage, self._current[-1].name)
        return result

    # where

    def _where(self) -> str:
        """The unit and the phase that the program is in, by the frames of the package."""
        frame = sys._getframe(2)
        unit = phase = None
        while frame is not None and (unit is None or phase is None):
            if "/fsdp_wrap/" in frame.f_code.co_filename:
                local = frame.f_locals
                for name in ("unit", "self", "use"):
                    found = local.get(name)
                    found = getattr(found, "unit", found) if name == "use" else found
                    unit = unit or (found if isinstance(found, Unit) else None)
                found = local.get("phase")
                phase = phase or (found if isinstance(found, Phase) else None)
            frame = frame.f_back
        if unit is not None:
            with suppress(AssertionError):  # its module is gone
                self._unit = unit.name
        in_backward = torch._C._current_graph_task_id() != -1
        return f"{self._unit}, {phase.value if phase else 'backward' if in_backward else 'forward'}"


class _Operators(TorchDispatchMode):
    """Sees every operator that reaches a plain tensor."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._simulation.is_aside or any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)
        if not all(map(_is_plain, types)):
            return NotImplemented  # which calls operators on plain tensors
        call = Call(func, args, kwargs)
        if any(each.device.type != "cpu" for each in call.given):
            return func(*args, **kwargs)
        return self._simulation.note_call(call, args, kwargs)


class _Functions(TorchFunctionMode):
    """Sees what no operator tells: numbers that the host reads, and tensors in its memory."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._simulation.is_aside:
            return func(*args, **kwargs)
        plain = bool(args) and _is_plain(type(args[0]))
        if func is torch.tensor:
            return self._made(func(*args, **kwargs), kwargs.get("device", "cpu"))
        if plain and func in _HOST_READS:
            self._simulation.read_by_host(args[0], _HOST_READS[func])
        by_name = func is torch.Tensor.to and args[1:2] == ("cpu",) and "copy" in kwargs
        if plain and (func is torch.Tensor.cpu or by_name):
            return self._simulation.fetched(args[0])
        return func(*args, **kwargs)

    def _made(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """Notes where a tensor of numbers of the program lies; a device by its name is the real CPU."""
        if device is None or device == "cpu":
            self._simulation.lies_on_host(tensor)
        else:
            self._simulation.host_waits_for(self._simulation.compute.clock, "torch.tensor to the device")
        return tensor


def _is_plain(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


@contextmanager
def simulations() -> Iterator[None]:
    """Lets threads use simulations while the context is open.

    torch has no mode for storages. So the one method by which they lose and get memory is replaced.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        simulation = Simulation.here()
        if simulation is None:
            return resize(storage, nbytes)
        return simulation.resized(storage, nbytes, lambda size: resize(storage, size))

    with simulating(Simulation.here), mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield
