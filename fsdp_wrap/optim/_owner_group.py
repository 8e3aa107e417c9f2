"""`OwnerGroup`: brings matrices that are sharded over the same ranks to their owners, and results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Communicator, Finished, Pending
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap.optim._owners import Load, owners_of, rounds_of
from fsdp_wrap.optim._sharded_params import Overlap, ShardedParam, overlaps
from fsdp_wrap.optim._views import Block

_STACKED = 1 << 18
"""Elements: matrices of fewer are computed with together, if they have one shape."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that has an owner.

    Attributes:
        name: Name of the parameter in the unwrapped module, with the matrix' number if it has several.
        parameter: Name of the parameter.
        shape: Rows and columns.
        owner: The rank that computes with it, as the default group counts.
        cost: Cost of the computation, by which ranks share it: rows x columns x the smaller of them.
        block: Where it is in the parameter.
    """

    name: str
    parameter: str
    shape: tuple[int, int]
    owner: int
    cost: int
    block: Block = field(repr=False)


Compute = Callable[[torch.Tensor, Sequence[Matrix]], torch.Tensor]
"""Takes matrices of one shape, stacked, which it may overwrite; returns as many results, stacked."""

Values = Sequence[torch.Tensor | None]
"""For each parameter what this rank has of something of its shape, flattened; None where that is nothing."""

_Moves = list[tuple[int, Overlap]]
"""Numbers of matrices, and parts of them that a message carries."""

_ByMatrix = Sequence[Sequence[Sequence[Overlap]]]
"""Parts of matrices, by matrix and rank."""


class OwnerGroup:
    """The ranks over which some parameters are sharded, and the matrices in these; made collectively."""

    def __init__(
        self,
        communicator: Communicator,
        held: Sequence[ShardedParam],
        blocks: Sequence[list[Block]],
        most: int,
    ) -> None:
        self.communicator, self.held, self._most = communicator, held, most
        told = [
            (sharded.fqn, tuple(sharded.shape), str(sharded.param.dtype), own, sharded.parts, sharded.copy)
            for sharded, own in zip(held, blocks)
        ]
        everyone: list[Any] = communicator.all_gather_object(told)
        _check_alike(everyone)
        self.params = [index for index, own in enumerate(blocks) for _ in own]
        self._blocks = [block for own in blocks for block in own]
        self.having = [
            [overlaps(everyone[rank][param][4], block) for rank in range(communicator.size)]
            for param, block in zip(self.params, self._blocks)
        ]
        self._copies = [[told[param][5] for told in everyone] for param in range(len(held))]
        self._loads = [*map(_load, self._blocks, self.having)]
        self.owners = self._choose_owners()
        self._travels = [
            any(parts and rank != owner for rank, parts in enumerate(having))
            for having, owner in zip(self.having, self.owners)
        ]
        self.giving = [*map(self._givers, range(len(self._blocks)))]
        self.matrices = self._named(blocks)
        self.dtype = reduce(torch.promote_types, (sharded.param.dtype for sharded in held))
        self._plans: dict[tuple[bool, ...], list[_Round]] = {}

    def _choose_owners(self) -> list[int]:
        """Divides trained matrices evenly among owners, and then frozen ones."""
        owners = [0] * len(self._blocks)
        for trained in (True, False):
            chosen = [
                index
                for index, param in enumerate(self.params)
                if self.held[param].param.requires_grad == trained
            ]
            chosen_owners = owners_of([self._loads[index] for index in chosen], self.communicator.size)
            for index, owner in zip(chosen, chosen_owners):
                owners[index] = owner
        return owners

    def _givers(self, index: int) -> list[list[Overlap]]:
        """Returns the parts of a matrix that each rank sends: each once, by the owner's replica if it can."""
        owner, copies = self.owners[index], self._copies[self.params[index]]
        size = self.communicator.size
        order = sorted(
            range(size), key=lambda r: (r != owner, copies[r] != copies[owner], (r - owner) % size)
        )
        giving: list[list[Overlap]] = [[] for _ in range(size)]
        missing, seen = self._blocks[index].numel, set[Any]()
        for rank in order:
            for overlap in self.having[index][rank] if missing > 0 else ():
                place = tuple((where.start, where.stop) for where in overlap.place)
                if place not in seen:
                    seen.add(place)
                    giving[rank].append(overlap)
                    missing -= overlap.numel
        if missing:
            fqn = self.held[self.params[index]].fqn
            raise ValueError(
                f"ranks {self._ranks} do not have just all of parameter '{fqn}' between them: shard it as "
                "FullyShardedDataParallel, fully_shard or torch.distributed.tensor.distribute_tensor do"
            )
        return giving

    @property
    def _ranks(self) -> list[int]:
        """The ranks, as the default group counts them."""
        group = self.communicator.group
        return sorted(self.communicator.members) if group is None else dist.get_process_group_ranks(group)

    def _named(self, blocks: Sequence[list[Block]]) -> list[Matrix]:
        ranks, owners = self._ranks, iter(self.owners)
        return [
            Matrix(
                f"{sharded.fqn}[{number}]" if len(own) > 1 else sharded.fqn,
                sharded.fqn,
                block.shape,
                ranks[next(owners)],
                block.cost,
                block,
            )
            for sharded, own in zip(self.held, blocks)
            for number, block in enumerate(own)
        ]

    def agreed(self, present: Sequence[bool | None]) -> list[bool]:
        """Returns which parameters have values; raises on all ranks if some ranks lack one. Collective."""
        own = [2 if flag is None else int(flag) for flag in present]
        if self.communicator.size == 1:
            return [code == 1 for code in own]
        full = self.communicator.empty(self.communicator.size * len(own), torch.uint8)
        part = self.communicator.own_part(full)
        mine = torch.tensor(own, dtype=torch.uint8)
        self.communicator.all_gather([full], lambda: part.copy_(mine)).wait()
        told = full.view(self.communicator.size, -1).tolist()
        for index, codes in enumerate(zip(*told)):
            if 0 in codes and 1 in codes:
                having, lacking = ([r for r, v in zip(self._ranks, codes) if v == value] for value in (1, 0))
                raise RuntimeError(
                    f"parameter '{self.held[index].fqn}' has a gradient on ranks {having} and none on ranks "
                    f"{lacking}, which have other parts of the same matrix: let all ranks have one, or none"
                )
        return [1 in codes for codes in zip(*told)]

    def update(
        self, values: Values, active: Sequence[bool], compute: Compute, dtype: torch.dtype | None
    ) -> list[torch.Tensor | None]:
        """Computes with whole matrices, each on its owner; collective."""
        dtype = dtype or self.dtype
        rounds = self._plan(tuple(active))
        results = [
            None if value is None or not known else torch.empty_like(value, dtype=dtype)
            for value, known in zip(values, active)
        ]
        back: _SentResults | None = None
        coming = rounds[0].send(values, dtype)
        for number, current in enumerate(rounds):
            following = rounds[number + 1].send(values, dtype) if number + 1 < len(rounds) else None
            going = current.compute(coming, values, compute, dtype)
            if back is not None:
                back.take(results)
            back, coming = going, following or coming
        assert back is not None
        back.take(results)
        return results

    def _plan(self, active: tuple[bool, ...]) -> list[_Round]:
        if active not in self._plans:
            loads = {
                index: load
                for index, (param, load) in enumerate(zip(self.params, self._loads))
                if active[param]
            }
            rounds = rounds_of(loads, self.owners, self._travels, self._most)
            self._plans[active] = [_Round(self, numbers) for numbers in rounds]
        return self._plans[active]


class _Round:
    """Some matrices that travel together: this rank's sends, receives and computations."""

    def __init__(self, group: OwnerGroup, numbers: Sequence[int]) -> None:
        self._group, self._communicator = group, group.communicator
        me, ranks = self._communicator.rank, range(self._communicator.size)
        owned = [index for index in numbers if group.owners[index] == me]

        def of_owner(rank: int, overlaps: _ByMatrix) -> _Moves:
            """Returns the moves between this rank and an owner."""
            own = [index for index in numbers if group.owners[index] == rank != me]
            return [(index, overlap) for index in own for overlap in overlaps[index][me]]

        def of_holder(rank: int, overlaps: _ByMatrix) -> _Moves:
            return [(index, overlap) for index in owned if rank != me for overlap in overlaps[index][rank]]

        self._sent = [of_owner(rank, group.giving) for rank in ranks]
        self._received = [of_holder(rank, group.giving) for rank in ranks]
        self._returned = [of_holder(rank, group.having) for rank in ranks]
        self._arriving = [of_owner(rank, group.having) for rank in ranks]
        self._kept = [(index, overlap) for index in owned for overlap in group.having[index][me]]
        others = [(index, rank) for index in numbers for rank in ranks if rank != group.owners[index]]
        self._comes = any(group.giving[index][rank] for index, rank in others)
        self._goes = any(group.having[index][rank] for index, rank in others)
        key: Callable[[int], tuple[int, ...]] = lambda index: _stack_key(group.matrices[index], index)  # noqa: E731
        self._stacks = [[*stack] for _, stack in groupby(sorted(owned, key=key), key=key)]

    def send(self, values: Values, dtype: torch.dtype) -> _SentParts:
        """Sends other ranks' parts of the values; returns the parts that arrive."""
        if not self._comes:
            return _SentParts(Finished(), [])
        sent = _empty(self._communicator, self._sent, dtype)
        sources = [self._held(values, move) for moves in self._sent for move in moves]
        _copy(_views(sent, self._sent), sources)
        received = _empty(self._communicator, self._received, dtype)
        lengths = _lengths(self._received), _lengths(self._sent)
        pending = self._communicator.all_to_all(received, sent, lengths)
        return _SentParts(pending, _views(received, self._received), [sent])

    def compute(
        self, coming: _SentParts, values: Values, compute: Compute, dtype: torch.dtype
    ) -> _SentResults:
        """Computes with this rank's matrices once they have arrived, and sends the results."""
        coming.pending.wait()
        stacks = [self._empty_stack(stack, dtype) for stack in self._stacks]
        matrices = {
            index: matrix
            for stack, stacked in zip(self._stacks, stacks)
            for index, matrix in zip(stack, stacked)
        }
        received = [move for moves in self._received for move in moves]
        _copy([self._placed(matrices, move) for move in received], coming.views)
        _copy(
            [self._placed(matrices, move) for move in self._kept],
            [self._held(values, move) for move in self._kept],
        )
        results: dict[int, torch.Tensor] = {}
        for stack, stacked in zip(self._stacks, stacks):
            computed = compute(stacked, [self._group.matrices[index] for index in stack])
            results.update(zip(stack, computed))
        return self._give_back(results, dtype)

    def _empty_stack(self, stack: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        shape = self._group.matrices[stack[0]].shape
        return torch.empty(len(stack), *shape, dtype=dtype, device=self._communicator.device)

    def _give_back(self, results: dict[int, torch.Tensor], dtype: torch.dtype) -> _SentResults:
        own = [(self._group.params[move[0]], move[1], self._placed(results, move)) for move in self._kept]
        if not self._goes:
            return _SentResults(Finished(), own)
        sent = _empty(self._communicator, self._returned, dtype)
        _copy(
            _views(sent, self._returned),
            [self._placed(results, move) for moves in self._returned for move in moves],
        )
        received = _empty(self._communicator, self._arriving, dtype)
        lengths = _lengths(self._arriving), _lengths(self._returned)
        pending = self._communicator.all_to_all(received, sent, lengths)
        moves = [move for moves in self._arriving for move in moves]
        for (index, overlap), view in zip(moves, _views(received, self._arriving)):
            own.append((self._group.params[index], overlap, view))
        return _SentResults(pending, own, [sent])

    def _held(self, values: Values, move: tuple[int, Overlap]) -> torch.Tensor:
        index, overlap = move
        value = values[self._group.params[index]]
        assert value is not None
        return overlap.of_held(value)

    def _placed(self, matrices: dict[int, torch.Tensor], move: tuple[int, Overlap]) -> torch.Tensor:
        index, overlap = move
        return matrices[index].view(self._group.matrices[index].block.sizes)[overlap.place]


@dataclass(frozen=True)
class _SentParts:
    """Parts of matrices on their way to their owner, in the order of messages. `sent` is kept alive."""

    pending: Pending
    views: list[torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _SentResults:
    """Results on their way from the owner: (index of the parameter, overlap, view). `sent` is kept alive."""

    pending: Pending
    parts: list[tuple[int, Overlap, torch.Tensor]]
    sent: list[torch.Tensor] = field(default_factory=list)

    def take(self, results: Sequence[torch.Tensor | None]) -> None:
        """Copies the arrived parts into the results."""
        self.pending.wait()
        targets, sources = [], []
        for param, overlap, source in self.parts:
            result = results[param]
            assert result is not None
            targets.append(overlap.of_held(result))
            sources.append(source)
        _copy(targets, sources)


def _stack_key(matrix: Matrix, index: int) -> tuple[int, ...]:
    small = matrix.shape[0] * matrix.shape[1] < _STACKED
    return (*matrix.shape, -1 if small else index)


def _lengths(messages: Sequence[_Moves]) -> list[int]:
    return [sum(overlap.numel for _, overlap in moves) for moves in messages]


def _empty(communicator: Communicator, messages: Sequence[_Moves], dtype: torch.dtype) -> torch.Tensor:
    return communicator.empty(sum(_lengths(messages)), dtype)


def _views(buffer: torch.Tensor, messages: Sequence[_Moves]) -> list[torch.Tensor]:
    parts = [overlap for moves in messages for _, overlap in moves]
    cut = torch.split_with_sizes(buffer, [overlap.numel for overlap in parts]) if parts else ()
    return [view.view(overlap.sizes) for view, overlap in zip(cut, parts)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        foreach_copy_(targets, sources)


def _load(block: Block, having: Sequence[Sequence[Overlap]]) -> Load:
    whole = (sum(part.numel for part in parts) == block.numel for parts in having)
    return Load(block.cost, block.numel, tuple(rank for rank, all_of_it in enumerate(whole) if all_of_it))


def _check_alike(everyone: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raises on all ranks if matrices differ between ranks."""
    described = [[entry[:4] for entry in told] for told in everyone]
    for rank, told in enumerate(described):
        if told != described[0]:
            names, first = [entry[0] for entry in told], [entry[0] for entry in described[0]]
            differing = sorted({*names} ^ {*first}) or [
                entry[0] for entry, other in zip(told, described[0]) if entry != other
            ]
            raise ValueError(
                f"ranks 0 and {rank} of {len(everyone)} have other matrices between them, beginning with "
                f"'{(differing or names)[0]}': select and cut the same on all ranks"
            )
