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
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bed.accelerator.memory import Action, Block, Region, conflicts, intervals_of
from bed.accelerator.operators import Call, leaves
from bed.accelerator.replay import Part, Recording, bytes_of, poison
from bed.accelerator.streams import HOST, Clock, Event, Stream, join
from fsdp_wrap._comm import device
from fsdp_wrap._comm.device import Accelerator
from fsdp_wrap._core import Phase
from fsdp_wrap._runtime.unit import Unit

_OURS = "/fsdp_wrap/"
_TELLING = ("unit", "self", "use", "phase")
"""Local variables that tell where the program is."""


HOST_LANE = "host lane"


class SimulatedHostLane:
    """A thread of the host that exists in name only: its work is done at once, and noted as done beside."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._clock = simulation, Clock()
        self._error: Exception | None = None

    def issue(self, work: Callable[[], None]) -> None:
        with self._simulation.in_host_lane(self._clock):
            try:
                work()
            except Exception as error:
                self._error = self._error or error

    def finish(self) -> None:
        self.abandon()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        self._simulation.join_host_lane(self._clock)


def _forget_in(simulation: weakref.ref[Simulation], number: int) -> None:
    there = simulation()
    if there is not None:
        there._forget(number)


class Simulation(Accelerator):
    """The streams, the memory and the host of one rank; it `records` actions for replays in other orders.

    Attributes:
        group_has_stream: Whether process groups run collectives on a stream of their own.
        runs_ahead: Whether the host goes on before the other ranks have come to a collective, which moves
            nothing then: for tests of missing ranks, not of numbers.
    """

    _of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self, records: bool = False) -> None:
        self.faults: list[str] = []
        self.host_waits: list[str] = []
        """For which call, and where."""
        super().__init__(torch.device("cpu"))
        self.group_has_stream = self.runs_ahead = False
        self.actions: list[Action] = []
        """In the order of the program."""
        self.recording = Recording(self._block) if records else None
        self._host_clock: Clock = {}
        self._host_queue = HOST
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
        self.peak_bytes = 0
        """The most bytes of all streams together since `end_step`."""
        self._waits_before = 0
        self._unit = "no unit"
        self.compute = self.stream("compute")
        self._current.append(self.compute)

    @classmethod
    def here(cls) -> Simulation | None:
        """Returns the simulation of the calling thread, if it is in use."""
        simulation: Simulation | None = getattr(cls._of_thread, "simulation", None)
        return simulation

    @contextmanager
    def use(self) -> Iterator[Simulation]:
        """Lets this thread's operators run on it."""
        self._of_thread.simulation = self
        self._active = True
        try:
            with _Operators(self):
                yield self
        finally:
            self._active = False
            self._of_thread.simulation = None
            if self.recording is not None:
                storages = [
                    (self._blocks[number], reference()) for number, reference in self._storages.items()
                ]
                self.recording.end([(block, storage) for block, storage in storages if storage is not None])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Ignores what only looks, and what has nothing to do with the device."""
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
        self.peak_bytes = self.live_bytes
        return waits, peaks

    @property
    def live_bytes(self) -> int:
        """Bytes that the allocators of all streams have given out."""
        return sum(self._live.values())

    # what the package asks for

    def stream(self, name: str) -> Stream:
        """Returns the stream of this name."""
        if name not in self._streams:
            self._streams[name] = Stream(name, self._current, self.host_waits_for)
        return self._streams[name]

    def current_stream(self) -> Any:
        return self._current[-1]

    def record_time(self) -> Any:
        return self.current_stream().record_event()

    def new_stream(self, purpose: str) -> Any:
        return self.stream(purpose)

    def new_host_lane(self, in_a_thread: Any) -> Any:
        return SimulatedHostLane(self)

    def prepare_to_ask(self) -> None:
        return None

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(numel, dtype=dtype)
            poison(tensor.untyped_storage())
        self._new_block(tensor.untyped_storage(), HOST, pin)
        return tensor

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._block(tensor).on_host

    def beside(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.fetched(tensor) if self._block(other).on_host else tensor

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a device tensor to host memory; the host waits for it."""
        if self._block(tensor).on_host:
            return tensor
        copied = self.empty_on_host(tensor.numel(), tensor.dtype, pin=False)
        return copied.copy_(tensor.detach().reshape(-1)).view(tensor.shape)  # of no dimension it also waits

    def lies_on_host(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor which was made just now lies in host memory."""
        block = self._block(tensor)
        self._live[block.queue] -= block.held
        block.queue = HOST

    # what is noted

    def host_waits_for(self, clock: Clock, what: str) -> None:
        """Notes that the host waits for something."""
        join(self._host_clock, clock)
        if self._host_queue == HOST:  # in a lane nobody else is held up
            self.host_waits.append(f"{what} ({self._where()})")

    @contextmanager
    def in_host_lane(self, clock: Clock) -> Iterator[None]:
        """Counts the host's actions as another thread's, whose clock grows by them."""
        join(clock, self._host_clock)
        before, self._host_clock, self._host_queue = self._host_clock, clock, HOST_LANE
        try:
            yield
        finally:
            self._host_clock, self._host_queue = before, HOST

    def join_host_lane(self, clock: Clock) -> None:
        """Lets the host wait for another thread."""
        join(self._host_clock, clock)

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
        queue = self._host_queue if queue == HOST else queue or stream.name
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
        given = [self._block(tensor) for tensor in call.given]
        arguments = None if self.recording is None else self.recording.describe((args, kwargs))
        result = call.operator(*args, **kwargs)
        fresh = self._fresh(call, result)
        tells = call.tells_the_host(result)
        if not (fresh or call.written or tells):
            return result
        on_host = bool(given) and all(block.on_host for block in given)
        for tensor in fresh:
            self._new_block(tensor.untyped_storage(), HOST if on_host else self._current[-1].name)
            if call.leaves_undefined:
                poison(tensor.untyped_storage())
        if call.name in ("aten::copy_", "aten::_foreach_copy_") and not on_host:
            on_host = all(self._block(tensor).on_host for tensor in call.written + call.read)
        action = self.act(call.name, call.read, [*call.written, *fresh], HOST if on_host else None)
        if self.recording is not None and arguments is not None:
            self.recording.add_call(action, call, arguments, result, fresh)
        self._note_host(call, args, kwargs, tells and not on_host)
        return result

    @staticmethod
    def _fresh(call: Call, result: Any) -> list[torch.Tensor]:
        """Returns the tensors in an operator's result that have memory of their own."""
        known = {tensor.untyped_storage()._cdata for tensor in call.given}
        fresh = []
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and storage.device.type == "cpu":  # not a fake one
                    fresh.append(leaf)
        return fresh

    def _note_host(self, call: Call, args: Any, kwargs: Any, tells: bool) -> None:
        """Notes where the host waits for an operator on the device."""
        stream = self._current[-1]
        if tells:
            self.host_waits_for(stream.clock, call.name)
            return
        of_host = [
            self._block(tensor) for tensor in call.given if tensor.dim() and self._block(tensor).on_host
        ]
        if not of_host or all(self._block(tensor).on_host for tensor in call.given):
            return
        if "copy" not in call.name:
            self.faults.append(f"{call.name} ({self._where()}) mixes memory of the host and of the device")
        later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        casts = len({tensor.dtype for tensor in call.given}) > 1  # by memory of the host that is not pinned
        if not later or casts or not all(block.pinned for block in of_host):
            way = "to" if any(self._block(tensor).on_host for tensor in call.written) else "from"
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
            # Memory that outlives the simulation must not keep all that was noted alive.
            weakref.finalize(storage, _forget_in, weakref.ref(self), id(storage)).atexit = False
            self._storages[id(storage)] = weakref.ref(storage)
        self._count += 1
        block = self._blocks[id(storage)] = Block(self._count, storage.nbytes(), queue, pinned)
        if queue != HOST:
            self._live[queue] += block.held
            self._peaks[queue] = max(self._peaks[queue], self._live[queue])
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
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
        """Returns the unit and the phase that the program is in, by the frames of the package."""
        frame: FrameType | None = sys._getframe(2)
        unit = phase = None
        while frame is not None and (unit is None or phase is None):
            for name in _telling(frame.f_code):
                local = frame.f_locals.get(name)
                local = getattr(local, "unit", local) if name == "use" else local
                if isinstance(local, Unit):
                    unit = unit or local
                elif isinstance(local, Phase):
                    phase = phase or local
            frame = frame.f_back
        if unit is not None:
            with suppress(AssertionError):  # its module is gone
                self._unit = unit.name
        in_backward = torch._C._current_graph_task_id() != -1
        return f"{self._unit}, {phase.value if phase else 'backward' if in_backward else 'forward'}"


@cache
def _telling(code: Any) -> Sequence[str]:
    """Returns the variables of some code that may tell a unit or a phase."""
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return [name for name in _TELLING if name in names] if _OURS in code.co_filename else []


class _Operators(TorchDispatchMode):
    """Sees every operator that reaches a plain tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nobody compiles this, and a wrapper around each operator takes its time

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._simulation.is_aside or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if not all(map(_is_plain, types)):
            return NotImplemented  # which calls operators on plain tensors
        if func.is_view:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        if not all(tensor.is_cpu for tensor in call.given):
            return func(*args, **kwargs)
        return self._simulation.note_call(call, args, kwargs)


def _is_plain(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


@contextmanager
def simulations() -> Iterator[None]:
    """Lets threads use simulations while the context is open.

    Some of what matters is no operator: how storages lose and get memory, how the host reads numbers, and
    which tensors lie in its memory. The few functions of torch that do so are replaced. A mode for all of
    torch's functions would see them too, but every other call would pay for it. Trials of optimizers are
    hidden.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "_simulated", Simulation.here))
        for owner, name, instead in _REPLACED:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _unless_nobody_looks(original, instead)))
        yield


def _unless_nobody_looks(original: Any, instead: Any) -> Any:
    """Calls `instead` with the thread's simulation and the original, if there is a simulation."""

    def function(*args: Any, **kwargs: Any) -> Any:
        simulation = Simulation.here()
        if simulation is None or simulation.is_aside:
            return original(*args, **kwargs)
        return instead(simulation, original, *args, **kwargs)

    return function


def _resized(simulation: Simulation, resize: Any, storage: torch.UntypedStorage, nbytes: int) -> Any:
    return simulation.resized(storage, nbytes, lambda size: resize(storage, size))


def _read(simulation: Simulation, read: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_plain(type(tensor)):
        simulation.read_by_host(tensor, read.__name__)
    return read(tensor, *args, **kwargs)


def _to_host(simulation: Simulation, cpu: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return simulation.fetched(tensor) if _is_plain(type(tensor)) else cpu(tensor, *args, **kwargs)


def _to(simulation: Simulation, to: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    by_name = args[:1] == ("cpu",) and "copy" in kwargs  # a device by its name is the real CPU
    return simulation.fetched(tensor) if by_name and _is_plain(type(tensor)) else to(tensor, *args, **kwargs)


def _made(simulation: Simulation, make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Notes where a tensor of numbers of the program lies; a device by its name is the real CPU."""
    tensor = make(*args, device=device, **kwargs)
    if device is None or device == "cpu":
        simulation.lies_on_host(tensor)
    else:
        simulation.host_waits_for(simulation.compute.clock, "torch.tensor to the device")
    return tensor


_REPLACED = (
    (torch.UntypedStorage, "resize_", _resized),
    (torch.Tensor, "tolist", _read),
    (torch.Tensor, "numpy", _read),
    (torch.Tensor, "cpu", _to_host),
    (torch.Tensor, "to", _to),
    (torch, "tensor", _made),
)
"""Owner and name of each replaced function, and its replacement."""
