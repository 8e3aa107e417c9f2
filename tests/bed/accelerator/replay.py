"""Replay of recorded actions in other orders that an accelerator might choose.

The device's memory is apart from the program's, and poisoned whenever it is allocated or freed. Each queue
does its actions in turn, as soon or as late as the events allow. The numbers that the host reads, and the
memory at the end, must have the bits that the program has seen.
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from bed.accelerator.memory import Action, Block
from bed.accelerator.operators import Call, leaves
from bed.accelerator.streams import HOST, Clock

_POISON = 0xFF
"""A byte that makes every floating-point number a NaN."""

Key = tuple[str, int]
"""A group, and the number of a collective there."""


class Different(AssertionError):
    """Another order has led to other numbers."""


@dataclass(eq=False)
class View:
    """Where a tensor lay."""

    block: Block
    dtype: torch.dtype
    size: torch.Size
    stride: Sequence[int]
    offset: int


@dataclass(eq=False)
class Part:
    """One rank's part in a collective."""

    key: Key
    rank: int
    """This rank in the group."""
    size: int
    work: Any
    """The function that does it, given the data of all ranks."""
    data: Any
    """This rank's data, views in the place of tensors."""


class Recording:
    """How one rank's actions are done again."""

    def __init__(self, block_of: Callable[[torch.Tensor], Block]) -> None:
        self.queues: dict[str, list[Action]] = defaultdict(list)
        """The actions by queue, in their order there."""
        self.parts: dict[Action, Part] = {}
        self._again: dict[Action, Callable[[Memory], object]] = {}
        self._last: list[tuple[Block, torch.Tensor, torch.Tensor]] = []
        self._block_of = block_of

    def view(self, tensor: torch.Tensor) -> View:
        block, offset = self._block_of(tensor), int(tensor.storage_offset())
        return View(block, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def describe(self, tree: Any) -> Any:
        """Puts views in the place of tensors."""
        return _replaced(tree, torch.Tensor, self.view)

    def add(self, action: Action, again: Callable[[Memory], object]) -> None:
        """Adds what was done last."""
        self._again[action] = again

    def add_call(
        self, action: Action, call: Call, arguments: Any, result: Any, fresh: list[torch.Tensor]
    ) -> None:
        """Adds an operator; a random one repeats its former result."""
        if call.leaves_undefined:
            return
        if call.random:
            known = [(self.view(tensor), tensor.clone()) for tensor in (*fresh, *call.written)]
            self.add(action, lambda memory: [memory.tensor(view).copy_(values) for view, values in known])
            return
        operator, ids, returned = call.operator, {id(tensor) for tensor in fresh}, leaves(result)
        targets = [self.view(leaf) if id(leaf) in ids else None for leaf in returned]
        seen = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in returned]

        def again(memory: Memory) -> None:
            args, kwargs = memory.tensors(arguments)
            for target, known, value in zip(targets, seen, leaves(operator(*args, **kwargs))):
                if target is not None:
                    memory.tensor(target).copy_(value)
                elif known is not None and known != value and known == known:
                    raise Different(f"the host got {value} of {action}, not {known}")

        self.add(action, again)

    def add_read(self, action: Action, tensor: torch.Tensor) -> None:
        """Adds that the host looks at numbers."""
        view, seen = self.view(tensor), tensor.detach().clone()

        def again(memory: Memory) -> None:
            if not torch.equal(memory.tensor(view).nan_to_num(), seen.nan_to_num()):
                raise Different(f"the host read other numbers in {action}")

        self.add(action, again)

    def add_free(self, action: Action, block: Block) -> None:
        """Adds that memory is freed."""
        self.add(action, lambda memory: memory.poison(block))

    def end(self, left: list[tuple[Block, torch.UntypedStorage]]) -> None:
        """Notes the final bytes of all memory that was written."""
        written: dict[Block, set[tuple[int, int]]] = defaultdict(set)
        for queue in self.queues.values():
            for action in queue:
                for region in action.writes:
                    written[region.block].update(region.intervals)
        for block, storage in left:
            if storage.nbytes() and written[block]:
                touched = torch.zeros(block.nbytes, dtype=torch.bool)
                for start, stop in written[block]:
                    touched[start:stop] = True
                self._last.append((block, bytes_of(storage).clone(), touched))

    def do(self, action: Action, memory: Memory) -> None:
        """Repeats an action that is not part of a collective."""
        again = self._again.get(action)
        if again is not None:
            again(memory)

    def compare(self, memory: Memory) -> None:
        """Compares the final bytes of all memory that was written; raises `Different`."""
        for block, expected, touched in self._last:
            wrong = (memory.bytes(block) != expected) & touched
            if wrong.any():
                byte = int(wrong.nonzero()[0])
                actions = (action for queue in self.queues.values() for action in queue)
                writers = [action for action in actions if any(one.block is block for one in action.writes)]
                raise Different(
                    f"byte {byte} of {block.nbytes} has another value in the end; written by "
                    + ", then ".join(map(str, writers[-3:]))
                )


class Memory:
    """The memory of one rank in one run."""

    def __init__(self) -> None:
        self._bytes: dict[Block, torch.Tensor] = {}
        self._wholes: dict[tuple[Block, torch.dtype], torch.Tensor] = {}

    def bytes(self, block: Block) -> torch.Tensor:
        if block not in self._bytes:
            if block.initial is None:
                self._bytes[block] = torch.full((block.nbytes,), _POISON, dtype=torch.uint8)
            else:
                self._bytes[block] = block.initial.clone()
        return self._bytes[block]

    def poison(self, block: Block) -> None:
        self.bytes(block).fill_(_POISON)

    def tensor(self, view: View) -> torch.Tensor:
        whole = self._wholes.get((view.block, view.dtype))
        if whole is None:
            storage = self.bytes(view.block).untyped_storage()
            whole = torch.empty(0, dtype=view.dtype).set_(storage, 0, (0,))  # type: ignore[call-overload]
            self._wholes[view.block, view.dtype] = whole
        return whole.as_strided(view.size, view.stride, view.offset)

    def tensors(self, tree: Any) -> Any:
        """Puts tensors in the place of views."""
        return _replaced(tree, View, self.tensor)


@dataclass(eq=False)
class _Queue:
    """One queue of one rank in one run."""

    rank: int
    name: str
    actions: Sequence[Action]
    needs: Sequence[Sequence[tuple[str, int]]]
    """For each of its actions, the new dependencies on other queues, as `(queue, tick)`."""
    done: int = 0
    in_meeting: bool = False
    """Whether its next one is a part of a collective for which other ranks have not come."""

    @property
    def next(self) -> Action:
        return self.actions[self.done]

    def is_ready(self, others: dict[str, _Queue]) -> bool:
        """Whether its next action may run, beside the queues of its rank."""
        if self.in_meeting or self.done == len(self.actions):
            return False
        for name, ticks in self.needs[self.done]:  # sooner than `all`, and asked for each action
            if others[name].done < ticks:
                return False
        return True


def _needs(name: str, actions: Sequence[Action]) -> list[Sequence[tuple[str, int]]]:
    """Returns the new dependencies of each action of a queue on other queues, as `(queue, tick)`."""
    before: Clock = {}
    waits: list[Sequence[tuple[str, int]]] = []
    for action in actions:
        clock = action.clock
        waits.append([(q, n) for q, n in clock.items() if q != name and n > before.get(q, 0)])
        before = clock
    return waits


_Turns = Callable[[], Iterable[_Queue]]
"""Tells in which order to look for a queue that can go on."""


class _Run:
    """One run of all ranks."""

    def __init__(self, recordings: Sequence[Recording], queues: Sequence[_Queue], turns: _Turns) -> None:
        self._recordings, self._queues, self._turns = recordings, queues, turns
        self._memories = [Memory() for _ in recordings]
        self._of_rank: list[dict[str, _Queue]] = [{} for _ in recordings]
        for queue in queues:
            self._of_rank[queue.rank][queue.name] = queue
        self._arrived: dict[Key, list[_Queue]] = defaultdict(list)

    def run(self) -> None:
        """Does everything and compares; raises `Different`."""
        left = sum(len(queue.actions) for queue in self._queues)
        while left:
            queue = next((one for one in self._turns() if one.is_ready(self._of_rank[one.rank])), None)
            if queue is None:
                raise Different("the queues wait for each other")
            left -= self._go_on(queue)
        for recording, memory in zip(self._recordings, self._memories):
            recording.compare(memory)

    def _go_on(self, queue: _Queue) -> int:
        """Does the next action of a queue; returns how many are done by that."""
        recording = self._recordings[queue.rank]
        part = recording.parts.get(queue.next)
        if part is None:
            recording.do(queue.next, self._memories[queue.rank])
            queue.done += 1
            return 1
        arrived = self._arrived[part.key]
        arrived.append(queue)
        queue.in_meeting = True
        if len(arrived) < part.size:
            return 0  # it goes on when the others have come
        by_rank: dict[int, Any] = {}
        for other in arrived:
            theirs = self._recordings[other.rank].parts[other.next]
            by_rank[theirs.rank] = self._memories[other.rank].tensors(theirs.data)
            other.done += 1
            other.in_meeting = False
        part.work.work([by_rank[rank] for rank in sorted(by_rank)])
        return len(arrived)


_KINDS = (View, torch.Tensor, list, tuple, dict)
"""Kinds of arguments that are replaced, or hold what is."""


def _replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns arguments in which everything of a kind is replaced."""
    if isinstance(tree, (list, tuple)):
        items = [_replaced(item, kind, change) if isinstance(item, _KINDS) else item for item in tree]
        return type(tree)(items)
    if isinstance(tree, dict):
        return {name: _replaced(item, kind, change) for name, item in tree.items()}
    return change(tree) if isinstance(tree, kind) else tree


def poison(storage: torch.UntypedStorage) -> None:
    """Fills memory that nobody has written to yet."""
    ctypes.memset(storage.data_ptr(), _POISON, storage.nbytes())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Views a storage as what it holds; no simulation notices."""
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def replay(recordings: Sequence[Recording], seeds: int) -> None:
    """Repeats everything: all but the computation as late as possible, then as early, then at random.

    It raises `Different` if another order leads to other numbers.
    """
    told = [
        (rank, name, actions, _needs(name, actions))
        for rank, recording in enumerate(recordings)
        for name, actions in recording.queues.items()
    ]

    def run(turns_of: Callable[[list[_Queue]], _Turns]) -> None:
        queues = [_Queue(*row) for row in told]
        _Run(recordings, queues, turns_of(queues)).run()

    with torch.no_grad():
        run(lambda queues: partial(iter, sorted(queues, key=_is_beside)))
        run(lambda queues: partial(iter, sorted(queues, key=_is_beside, reverse=True)))
        for seed in range(seeds):
            run(lambda queues, seed=seed: _by_chance(queues, random.Random(seed)))  # type: ignore[misc]


def _is_beside(queue: _Queue) -> bool:
    return queue.name not in ("compute", HOST)


def _by_chance(queues: list[_Queue], generator: random.Random) -> _Turns:
    def turns() -> Iterable[_Queue]:
        first = generator.randrange(len(queues))
        return queues[first:] + queues[:first]

    return turns
