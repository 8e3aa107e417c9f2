"""What was done once in the order of the program, done again in orders that an accelerator might choose.

The device's memory is apart from the program's, and poisoned whenever it is allocated or freed. Each queue
does its actions in turn, as soon or as late as the events allow. What the host reads, and what is there in
the end, must have the bits that the program has seen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bed.accelerator.memory import Action, Block
from bed.accelerator.operators import Call
from bed.accelerator.streams import Clock

_POISON = 0xFF
"""Of these bytes every floating-point number is a NaN."""

_WRITES_NOTHING = frozenset(f"aten::{each}" for each in ("empty", "empty_strided", "empty_like", "new_empty"))

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
    """One rank's part in a collective.

    Attributes:
        key: Which one it is.
        rank: This one's in the group.
        size: How many ranks there are in the group.
        work: What does it, given the data of all ranks.
        data: This rank's, views in the place of tensors.
    """

    key: Key
    rank: int
    size: int
    work: Any
    data: Any


class Recording:
    """How one rank's actions are done again.

    Attributes:
        queues: The actions by queue, in their order there.
        parts: Which of them are parts of collectives.
    """

    def __init__(self, block_of: Callable[[torch.Tensor], Block]) -> None:
        self.queues: dict[str, list[Action]] = defaultdict(list)
        self.parts: dict[Action, Part] = {}
        self._again: dict[Action, Callable[[Memory], object]] = {}
        self._last: list[tuple[Block, torch.Tensor]] = []
        self._block_of = block_of

    def view(self, tensor: torch.Tensor) -> View:
        block, offset = self._block_of(tensor), tensor.storage_offset()
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
        """Adds an operator; what is random has the outcome that it had."""
        if call.name in _WRITES_NOTHING:
            return
        if call.random:
            known = [(self.view(each), each.clone()) for each in (*fresh, *call.written)]
            self.add(action, lambda memory: [memory.tensor(view).copy_(values) for view, values in known])
            return
        ids, leaves = {id(each) for each in fresh}, tree_leaves(result)
        targets = [self.view(each) if id(each) in ids else None for each in leaves]
        seen = [None if isinstance(each, torch.Tensor) else each for each in leaves]

        def again(memory: Memory) -> None:
            args, kwargs = memory.tensors(arguments)
            for target, known, found in zip(targets, seen, tree_leaves(call.operator(*args, **kwargs))):
                if target is not None:
                    memory.tensor(target).copy_(found)
                elif known is not None and known != found and known == known:
                    raise Different(f"the host got {found} of {action}, not {known}")

        self.add(action, again)

    def add_read(self, action: Action, tensor: torch.Tensor) -> None:
        """Adds that the host looks at numbers."""
        view, seen = self.view(tensor), tensor.detach().clone()

        def again(memory: Memory) -> None:
            if not torch.equal(memory.tensor(view).nan_to_num(), seen.nan_to_num()):
                raise Different(f"the host read other numbers in {action}")

        self.add(action, again)

    def add_free(self, action: Action, block: Block) -> None:
        """Adds that memory goes."""
        self.add(action, lambda memory: memory.poison(block))

    def end(self, left: list[tuple[Block, torch.UntypedStorage]]) -> None:
        """Notes what is there in the end."""
        self._last = [(block, bytes_of(storage.clone())) for block, storage in left if storage.nbytes()]

    def do(self, action: Action, memory: Memory) -> None:
        """Does an action again that is no part of a collective."""
        if action in self._again:
            self._again[action](memory)

    def compare(self, memory: Memory) -> None:
        """Compares what is there in the end, where anything was written.

        Raises:
            Different: If it is something else.
        """
        written: dict[Block, list[Action]] = defaultdict(list)
        for queue in self.queues.values():
            for action in queue:
                for region in action.writes:
                    written[region.block].append(action)
        for block, expected in self._last:
            touched = torch.zeros(block.nbytes, dtype=torch.bool)
            for action in written[block]:
                for region in action.writes:
                    for start, stop in region.intervals if region.block is block else ():
                        touched[start:stop] = True
            wrong = (memory.bytes(block) != expected) & touched
            if wrong.any():
                byte = int(wrong.nonzero()[0])
                raise Different(
                    f"byte {byte} of {block.nbytes} has another value in the end; written by "
                    + ", then ".join(map(str, written[block][-3:]))
                )


class Memory:
    """The memory of one rank in one run."""

    def __init__(self) -> None:
        self._bytes: dict[Block, torch.Tensor] = {}

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
        storage = self.bytes(view.block).untyped_storage()
        return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.size, view.stride)

    def tensors(self, tree: Any) -> Any:
        """Puts tensors in the place of views."""
        return _replaced(tree, View, self.tensor)


class _Run:
    """One run of all ranks.

    Args:
        recordings: One of each rank.
        first: Which of two queues, given as (rank, name), is to go on first: that with the smaller number.
    """

    def __init__(self, recordings: Sequence[Recording], first: Callable[[tuple[int, str]], float]) -> None:
        self._recordings, self._first = recordings, first
        self._memories = [Memory() for _ in recordings]
        self._done: list[Clock] = [Clock() for _ in recordings]
        self._arrived: dict[Key, list[tuple[int, Action]]] = defaultdict(list)

    def run(self) -> None:
        """Does everything and compares.

        Raises:
            Different: If another order leads to other numbers.
        """
        left = sum(len(queue) for each in self._recordings for queue in each.queues.values())
        while left:
            ready = [
                (rank, name)
                for rank, recording in enumerate(self._recordings)
                for name in recording.queues
                if self._is_ready(rank, name)
            ]
            if not ready:
                raise Different("the queues wait for each other")
            rank, name = min(ready, key=self._first)
            left -= self._go_on(rank, name)
        for recording, memory in zip(self._recordings, self._memories):
            recording.compare(memory)

    def _next(self, rank: int, name: str) -> Action | None:
        queue, done = self._recordings[rank].queues[name], self._done[rank].get(name, 0)
        return queue[done] if done < len(queue) else None

    def _is_ready(self, rank: int, name: str) -> bool:
        action, done = self._next(rank, name), self._done[rank]
        if action is None or any(
            done.get(queue, 0) < ticks for queue, ticks in action.clock.items() if queue != name
        ):
            return False
        part = self._recordings[rank].parts.get(action)
        return part is None or (rank, action) not in self._arrived[part.key]

    def _go_on(self, rank: int, name: str) -> int:
        """Does the next action of a queue; returns how many are done by that."""
        action, recording = self._next(rank, name), self._recordings[rank]
        assert action is not None
        part = recording.parts.get(action)
        if part is None:
            recording.do(action, self._memories[rank])
            self._done[rank][name] = action.tick
            return 1
        arrived = self._arrived[part.key]
        arrived.append((rank, action))
        if len(arrived) < part.size:
            return 0  # it goes on when the others have come
        by_rank: dict[int, Any] = {}
        for member, theirs in arrived:
            of_member = self._recordings[member].parts[theirs]
            by_rank[of_member.rank] = self._memories[member].tensors(of_member.data)
            self._done[member][theirs.queue] = theirs.tick
        part.work.work([by_rank[each] for each in sorted(by_rank)])
        return len(arrived)


def _replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns arguments with something else in the place of all of a kind."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_replaced(each, kind, change) for each in tree])
    if isinstance(tree, dict):
        return {name: _replaced(each, kind, change) for name, each in tree.items()}
    return tree


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


def replay(recordings: Sequence[Recording], seeds: int) -> None:
    """Does everything again: all but the computation as late as can be, then as early, then by chance.

    Raises:
        Different: If another order leads to other numbers.
    """
    beside = {name for each in recordings for name in each.queues} - {"compute", "host"}
    orders: list[Callable[[tuple[int, str]], float]] = [
        lambda queue: queue[1] in beside,
        lambda queue: queue[1] not in beside,
    ]
    for seed in range(seeds):
        generator = random.Random(seed)
        orders.append(lambda _, generator=generator: generator.random())  # type: ignore[misc]
    with torch.no_grad():
        for order in orders:
            _Run(recordings, order).run()
