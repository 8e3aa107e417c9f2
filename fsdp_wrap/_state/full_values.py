"""Full tensors from what the ranks hold, and from the first rank to all.

`stream` gathers them one after the other, the next ones on their way while one is in use, within a budget.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator, Pending, calling, deaths_told, make_communicator, ranks_in
from fsdp_wrap._core import is_castable, is_owned, named, params, persistent, saved_tensors
from fsdp_wrap._core.torch_private import ShardedTensor, pytree
from fsdp_wrap._params import Buffers, FlatParameter, IntervalTensor, LocalPart, assemble
from fsdp_wrap._runtime import Unit, buffers_of, units_in
from fsdp_wrap._state.full_params import original_buffers, settle
from fsdp_wrap._state.originals import Originals, owned_places, uncompiled_fqn

Named = tuple[str, torch.Tensor]
T = TypeVar("T")


class Receivers(Protocol):
    """The ranks that keep what is gathered, where not all do."""

    def wants(self, value: FullValue) -> bool:
        """Whether this rank keeps a value."""

    def rank_in(self, value: FullValue) -> int | None:
        """Returns the one rank of the value's communicator that receives it; None if all do."""


_SMALL, _BATCH = 2**16, 2**20
"""Most bytes of a tensor that travels with others, as a message costs more than a copy; and of them all."""


@dataclass(frozen=True)
class FullValue:
    """A full tensor that ranks hold between them, in consecutive parts, and that can be gathered.

    Attributes:
        key: Its name, or another key.
        dtype: In which it is gathered.
        lengths: Elements of each rank.
        write: Writes this rank's elements into a 1-D tensor.
        part: The part of the tensor that these ranks hold, where tensor parallelism has cut it.
        whole: Converts the gathered tensor to the one that users see, if they differ.
        numbers: Shape and dtype of that one, if it is a plain tensor made of codes.
    """

    key: Any
    shape: torch.Size
    dtype: torch.dtype
    communicator: Communicator
    lengths: Sequence[int]
    write: Callable[[torch.Tensor], object]
    part: LocalPart | None = None
    whole: Callable[[torch.Tensor], torch.Tensor] | None = None
    numbers: tuple[torch.Size, torch.dtype] | None = None

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full tensor, also where the ranks hold a part between them."""
        return self.shape if self.part is None else self.part.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor, or of the codes and the numbers that they mean."""
        codes = self.full_shape.numel() * self.dtype.itemsize
        return codes if self.numbers is None else codes + self.numbers[0].numel() * self.numbers[1].itemsize

    def cast(self, dtype: torch.dtype | None) -> FullValue:
        """Returns it in another dtype: the tensor that travels, or the numbers that codes mean."""
        if dtype is None or (self.whole is not None and self.numbers is None):
            return self
        if self.numbers is None:
            return replace(self, dtype=dtype)
        whole = self.whole
        assert whole is not None
        return replace(self, whole=lambda codes: whole(codes).to(dtype), numbers=(self.numbers[0], dtype))

    def travels_with(self, other: FullValue) -> bool:
        """Whether the two can be parts of one message from each rank."""
        same_ranks = self.communicator == other.communicator and self.communicator.size > 1
        return same_ranks and self.dtype == other.dtype and self.part is other.part is None


def full_values(buffers: Buffers) -> list[FullValue]:
    """Returns a unit's parameters, by layout and index; in master dtype."""
    return [
        FullValue(
            (sharded, index),
            interval.held_shape,
            sharded.dtype,
            buffers.communicator,
            lengths,
            copier(interval.data),
            interval.part,
            None if sharded.wanted(index) is None else partial(sharded.whole, index),
        )
        for sharded in buffers.params
        for index, (interval, lengths) in enumerate(zip(sharded.intervals(), sharded.layout.held_by_rank()))
    ]


def check_dtype(dtype: Any) -> None:
    """Raises unless it is a floating-point dtype or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, not {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, not {dtype}")


def value_held_here(key: str, tensor: torch.Tensor) -> FullValue:
    """Returns a tensor that no unit owns: this rank has it whole, or it is a `DTensor`."""
    if tensor.is_meta:
        raise RuntimeError(
            f"'{key}' is on the meta device and has no values: call to_empty(device=...) on the model and "
            "initialise or load it first"
        )
    alone = make_communicator(None, tensor.device)
    # Writing is collective too: it is where ranks take part in a gather.
    write = (lambda out: copier(unsharded(tensor))(out)) if is_sharded(tensor) else copier(tensor)
    return FullValue(key, tensor.shape, tensor.dtype, alone, [tensor.numel()], write)


def copier(source: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Returns a function that copies a tensor into another one with as many elements."""
    return lambda out: out.view(source.shape).copy_(source.detach(), non_blocking=True)


def offloaded(tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
    """Returns a copy in memory of its own, on the host or where the tensor is."""
    return tensor.to("cpu", copy=True) if to_host else tensor.clone()


def copied(value: Any, to_host: bool = False) -> Any:
    """Returns a copy of anything, of a tensor as `offloaded`."""
    return offloaded(value, to_host) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


# one after the other


class _Everyone:
    """All ranks keep all."""

    def wants(self, value: FullValue) -> bool:
        return True

    def rank_in(self, value: FullValue) -> int | None:
        return None


_EVERYONE = _Everyone()

_Issued = tuple[list[FullValue], list[Callable[[], torch.Tensor]], Pending]
"""A batch on its way, what makes each of its full tensors, and what to wait for before."""


def check_budget(budget: int | None) -> None:
    """Raises unless it is a positive int or None."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise TypeError(f"budget must be a number of bytes or None, not {budget!r}")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget must be a positive number of bytes, not {budget}")


def stream(
    values: Iterable[FullValue], budget: int, *, only: Receivers | None = None, to_host: bool = False
) -> Generator[tuple[Any, torch.Tensor]]:
    """Gathers tensors in order; collective.

    The budget bounds how many are on their way; one always is. A caller that closes the iterator
    early takes part in the remaining gathers nevertheless: the other ranks cannot know, and wait for it.
    Small tensors travel together.

    Args:
        values: The same ones on every rank.
        budget: The most bytes of what is on its way, of the tensor that is yielded, and of the one before,
            which a loop's variable still holds while the next tensor is fetched.
        only: The ranks that keep them, and the others yield tensors on the meta device; None for all.
        to_host: Yield them in host memory.

    Yields:
        (key, full tensor in memory of its own).
    """
    only = only or _EVERYONE
    waiting, issued, held = deque(_batches(values, budget, only)), deque[_Issued](), 0
    try:
        while _issue(waiting, issued, budget - held, only):
            batch, makers = _arrived(issued.popleft())
            for value in batch:
                wanted = only.wants(value)
                held = value.nbytes if wanted else 0
                full = _made(value, makers.pop(0), wanted, to_host)
                yield value.key, full
                del full
    except GeneratorExit:
        while _issue(waiting, issued, budget, only):
            batch, makers = _arrived(issued.popleft())
            if batch[0].part is not None:  # which travels alone, and once more
                _made(batch[0], makers.pop(), False, to_host)
        raise


def _issue(waiting: deque[list[FullValue]], issued: deque[_Issued], room: int, only: Receivers) -> bool:
    """Issues gathers that fit into `room`, but at least one; returns whether any is in flight."""
    room -= sum(_nbytes(batch) for batch, _, _ in issued)
    while waiting and (not issued or _nbytes(waiting[0]) <= room):
        batch = waiting.popleft()
        room -= _nbytes(batch)
        issued.append((batch, *_gather(batch, only)))
    return bool(issued)


def _arrived(issued: _Issued) -> tuple[list[FullValue], list[Callable[[], torch.Tensor]]]:
    batch, makers, pending = issued  # which may hold what arrives: it is not to outlive this call
    pending.wait()
    return batch, makers


def _made(value: FullValue, make: Callable[[], torch.Tensor], wanted: bool, to_host: bool) -> torch.Tensor:
    full = make() if wanted or value.part is not None else None
    if value.part is not None and full is not None:
        full = value.part.whole(full)
    if full is None or not wanted:
        full = torch.empty(value.full_shape, dtype=value.dtype, device="meta")
    elif to_host:
        full = full.cpu()
    return full if value.whole is None else value.whole(full)


def _batches(values: Iterable[FullValue], budget: int, only: Receivers) -> Iterator[list[FullValue]]:
    """Puts small values together that travel in one message from each rank.

    The same ones on every rank, whatever it keeps. Beside what arrived, two tensors made of it may be alive,
    or one and that before the batch: twice a batch's size must fit into the budget beside the latter.
    """
    batch: list[FullValue] = []
    room, filled = budget // 2, 0
    for value in values:
        nbytes = value.nbytes
        small = nbytes <= _SMALL and filled + nbytes <= min(_BATCH, room)
        together = small and bool(batch) and batch[0].nbytes <= _SMALL and value.travels_with(batch[0])
        if batch and not (together and only.rank_in(value) == only.rank_in(batch[0])):
            yield batch
            room, filled = (budget - batch[-1].nbytes) // 2, 0
            batch = []
        batch.append(value)
        filled += nbytes
    if batch:
        yield batch


def _nbytes(batch: list[FullValue]) -> int:
    """Returns the bytes that a batch takes, with what is made of it."""
    nbytes = sum(value.nbytes for value in batch)
    return nbytes if len(batch) == 1 else 2 * nbytes


def _receiver(value: FullValue, only: Receivers) -> int | None:
    """Returns the one rank of a value's communicator that receives it; None if all do."""
    return only.rank_in(value) if value.part is None and value.communicator.size > 1 else None


def _gather(values: Sequence[FullValue], only: Receivers) -> tuple[list[Callable[[], torch.Tensor]], Pending]:
    """Issues one gather of one or several values, to all ranks or to one.

    Returns:
        For each value what makes, after the wait, the full tensor in memory of its own, once; and what to
        wait for. One alone arrives in its place; several arrive side by side and are copied from there.
    """
    communicator, dtype = values[0].communicator, values[0].dtype
    by_rank = [list(of_rank) for of_rank in zip(*(value.lengths for value in values))]
    lengths = [sum(of_rank) for of_rank in by_rank]

    def write(own: torch.Tensor) -> None:
        for value, part in zip(values, torch.split(own, by_rank[communicator.rank])):
            value.write(part)

    to = _receiver(values[0], only)
    alone = to is not None and communicator.rank != to
    arriving = communicator.empty(lengths[communicator.rank] if alone else sum(lengths), dtype)
    if to is not None:
        own = arriving if alone else torch.split(arriving, lengths)[to]
        write(own)
        pending = _sent_to(to, communicator, arriving[:0] if alone else arriving, own, lengths)
    else:
        pending = communicator.all_gather_parts(arriving, lengths, write)
    if len(values) == 1 or alone:  # the latter are not made
        return [lambda: arriving.view(values[0].shape)] * len(values), pending
    parts = [torch.split(of_rank, sizes) for of_rank, sizes in zip(torch.split(arriving, lengths), by_rank)]
    return [partial(_joined, value, of_value) for value, of_value in zip(values, zip(*parts))], pending


def _sent_to(
    to: int, communicator: Communicator, arriving: torch.Tensor, own: torch.Tensor, lengths: Sequence[int]
) -> Pending:
    """Issues a gather, as bytes, in which one rank receives what all send; its own part is in its place."""
    size, none = own.dtype.itemsize, [0] * communicator.size
    coming = [size * length for length in lengths] if communicator.rank == to else none
    going = [own.nbytes if rank == to else 0 for rank in range(communicator.size)]
    return communicator.all_to_all(arriving.view(torch.uint8), own.view(torch.uint8), (coming, going))


def _joined(value: FullValue, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    full = value.communicator.empty(value.shape.numel(), value.dtype)
    torch.cat(tuple(parts), out=full)
    return full.view(value.shape)


# of parameters


def iter_full_params(
    module: nn.Module,
    *,
    budget: int | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    buffers: bool = False,
) -> Generator[tuple[str, torch.Tensor]]:
    """Yields full parameters one by one, in module order, while the next are on their way; collective.

    Every rank iterates with the same arguments. A rank that breaks off early leaves a usable model and no
    work in flight, whatever the others do: closing the iterator, as `break` in a for loop does, takes part in
    the remaining gathers. So that saves nothing; iterate over a submodule where a part is enough. Use
    `contextlib.closing` where the iterator is kept in a variable or the loop may raise, and do not train
    before it is closed: each parameter is yielded as it is when its gather begins.

    Args:
        module: Any module; all units at and below it take part, and parameters outside of units are copied.
        budget: The most bytes alive at any time of what is on its way, the tensor yielded last, and the one
            before it, which a loop's variable holds while the next one is fetched. One parameter is gathered
            in any case. None for twice the largest unit. The caller owns the values it keeps.
        rank0_only: Only the first rank gets them (see `summon_full_params`); the others yield the same names
            with tensors on the meta device.
        offload_to_cpu: Yield them in host memory.
        dtype: Cast floating-point parameters to this before they travel, save quantised ones; None for the
            master dtype.
        buffers: Yield the persistent buffers after the parameters, in their own dtype.

    Yields:
        (name in the unwrapped module, full tensor). The tensor is a copy, which stays valid. A tied parameter
        comes once, under the first of its names; `param_aliases` knows the others.

    Raises:
        RuntimeError: At the call: inside a forward, backward or `summon_full_params`; if a parameter is on
            the meta device.
        TypeError: If `budget` is no int, or `dtype` no dtype.
        ValueError: If `budget` is not positive, `dtype` not a floating-point type, or `module` a part of a
            unit; on all ranks, if they pass another `budget`, `dtype` or `buffers`.
    """
    params = FullParams(module, "iter_full_params()", dtype=dtype, buffers=buffers)
    return params.stream(budget=budget, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)


def param_aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the further names of tied parameters and buffers, by the one under which they are yielded.

    Args:
        module: Any module.
    """
    owned = owned_places(units_in(module).values())
    names: dict[object, list[str]] = {}
    for fqn, place, tensor in named(module, saved_tensors, all_names=True):
        if place in owned or not isinstance(tensor, FlatParameter | None):
            key = owned[place].key if place in owned else id(tensor)
            names.setdefault(key, []).append(uncompiled_fqn(fqn))
    return {first: tuple(others) for first, *others in names.values() if others}


class FullParams:
    """The full parameters of a module, described before anything is gathered.

    Arguments are those of `iter_full_params`; `doing` names the caller in messages. With `numbers`, codes
    with side data are given as the numbers that they mean.
    """

    def __init__(
        self,
        module: nn.Module,
        doing: str,
        *,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        numbers: bool = False,
    ) -> None:
        check_dtype(dtype)
        units = settled_units(module, doing)
        self._module, names = module, Originals(module)
        self._doing, self._chosen = doing, {"dtype": dtype, "buffers": buffers}
        self._values = [_cast(value, dtype) for value in _params(names, numbers)]
        self._budget = 2 * names.largest_unit_nbytes()
        if buffers:
            self._values += [
                value_held_here(*named_buffer) for named_buffer in persistent_buffers(module, units)
            ]

    def refuse_subclasses(self, doing: str) -> None:
        """Raises TypeError if a full value is of a tensor subclass."""
        made = self.subclasses
        if made:
            raise TypeError(
                f"{doing} takes plain tensors, and '{min(made)}' is of a tensor subclass: save the full "
                "state_dict() by torch.save, or the model by fsdp_wrap.checkpoint"
            )

    def described(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Returns shapes and dtypes by name, in order."""
        return {value.key: value.numbers or (value.full_shape, value.dtype) for value in self._values}

    @property
    def subclasses(self) -> set[str]:
        """Names of those whose full values are of a tensor subclass."""
        return {value.key for value in self._values if value.whole is not None and value.numbers is None}

    def choose(self, wanted: Mapping[str, torch.dtype]) -> None:
        """Keeps only these parameters, in this order and these dtypes."""
        values = {value.key: value for value in self._values}
        self._values = [values[name].cast(dtype) for name, dtype in wanted.items()]

    def stream(
        self,
        *,
        budget: int | None = None,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        keepers: Keepers | None = None,
        alike: Mapping[str, object] | None = None,
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Gathers them, as `iter_full_params`; collective.

        With `keepers` each goes to one rank, in an order in which all have something to do. `alike` are
        further arguments of the user's call that all ranks must give alike, by name.
        """
        check_budget(budget)
        budget = budget or self._budget
        communicators = dict.fromkeys(value.communicator for value in self._values)
        with calling(self._doing, [communicator.positions for communicator in communicators]):
            for communicator in communicators:
                communicator.agree(self._doing, {**self._chosen, **(alike or {}), "budget": budget})
        if keepers is not None:
            return stream(keepers.in_turns(self._values), budget, only=keepers, to_host=offload_to_cpu)
        only = FirstRank(self._module) if rank0_only else None
        return stream(self._values, budget, only=only, to_host=offload_to_cpu)


def settled_units(module: nn.Module, doing: str) -> list[Unit]:
    """Returns the units of a module, resharded to read what they hold."""
    units = list(units_in(module).values())
    settle(units, doing)
    owned = owned_places(units)
    for fqn, (child, name), param in named(module, params):
        hidden = isinstance(child.__dict__.get(name), torch.Tensor)
        foreign = hidden if param is None else is_owned(param) and not isinstance(param, FlatParameter)
        if foreign and (child, name) not in owned:
            raise ValueError(f"'{fqn}' belongs to a unit around this module: pass that one to {doing}")
    return units


def _params(names: Originals, numbers: bool) -> Iterator[FullValue]:
    all_buffers = dict.fromkeys(
        original.buffers for original in names.by_name.values() if original.buffers is not None
    )
    owned = {value.key: value for buffers in all_buffers for value in full_values(buffers)}
    for fqn, original in names.by_name.items():
        if original.key in owned:
            value, side = owned[original.key], original.side_data
            value = replace(value, key=fqn)
            if side is not None:
                meant = side.plain(torch.empty(value.full_shape, device="meta"))
                made = {"whole": side.plain, "numbers": (meant.shape, meant.dtype)}
                value = replace(value, **(made if numbers else {"whole": side.parameter}))
            yield value
        else:
            yield value_held_here(fqn, original.source)


def _cast(value: FullValue, dtype: torch.dtype | None) -> FullValue:
    held = value.dtype if value.numbers is None else value.numbers[1]
    return value.cast(dtype) if is_castable(held) else value


def persistent_buffers(module: nn.Module, units: Iterable[Unit]) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers of a state dict by name, in their own dtype."""
    with original_buffers(units):
        return [(uncompiled_fqn(fqn), buffer) for fqn, _, buffer in named(module, persistent)]


# of torch's own kinds


def is_sharded(value: Any) -> bool:
    """Whether a value is of one of torch's own kinds of sharded tensors."""
    return isinstance(value, (DTensor, ShardedTensor)) and not isinstance(value, IntervalTensor)


def shape_of(value: Any, default: Any = None) -> Any:
    """Returns the shape of a value, or the default if it has none.

    Torch warns of whatever is asked of a `ShardedTensor`, but of its metadata: a user who loads one has not
    asked for its shape.
    """
    return value.metadata().size if isinstance(value, ShardedTensor) else getattr(value, "shape", default)


def unsharded(value: Any) -> Any:
    """Returns torch's own kinds of sharded tensors as full ones (collective), all else as it is."""
    if not is_sharded(value):
        return value
    if isinstance(value, DTensor):
        with deaths_told():
            return value.full_tensor()
    metadata = value.metadata()

    def write(full: torch.Tensor) -> None:
        for shard in value.local_shards():
            bounds = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            full[tuple(slice(first, first + size) for first, size in bounds)].copy_(shard.tensor)

    return assemble(metadata.size, metadata.tensor_properties.dtype, [value._process_group], write)


# to and from the first rank


@dataclass(frozen=True)
class Announced:
    """Metadata of a tensor of the first rank, which is broadcast by itself; `own` is the tensor there."""

    shape: torch.Size
    dtype: torch.dtype
    own: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        return Announced, (self.shape, self.dtype)


class FirstRank:
    """Broadcasts from the first rank to all that hold a module: over the replicas, then within each copy.

    Before these, to the ranks that hold other parts of it, where tensor parallelism has distributed it. The
    module's first unit has the ranks; without units nothing is sent.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = buffers_of(units_in(module).values())
        self.steps: list[Communicator] = [owners[0].replicas, owners[0].communicator] if owners else []
        self._beside = _beside(owners)
        self.steps[:0] = self._beside
        first_of_all = not dist.is_initialized() or dist.get_rank() == 0
        self.is_here = all(communicator.rank == 0 for communicator in self.steps) if owners else first_of_all

    @property
    def reaches(self) -> int:
        """The number of ranks that it broadcasts to, with itself."""
        return math.prod(communicator.size for communicator in self.steps)

    def wants(self, value: FullValue) -> bool:
        """Whether this rank keeps a value that is gathered."""
        return self.is_here

    def rank_in(self, value: FullValue) -> int | None:
        """Returns the one rank of the value's communicator that receives it; None if all do."""
        return 0 if value.communicator in self.steps[-1:] else None

    def is_first_with(self, buffers: Buffers) -> bool:
        """Whether it is the first rank with its shard of parameters that tensor parallelism does not cut."""
        own = buffers.communicator.members  # which hold other rows, also those of them that are beside
        return buffers.replicas.rank == 0 and all(
            communicator.rank == 0 or communicator.members <= own for communicator in self._beside
        )

    def object(self, value: Any) -> Any:
        """Returns the first rank's value, which must be small and picklable."""
        for communicator in self.steps:
            value = communicator.broadcast_object(value)
        return value

    def uses(self, tensors: Iterator[Named], use: Callable[[Iterator[Named]], T], doing: str) -> T:
        """Lets the first rank use tensors that all ranks gather; collective. Its error is raised on all.

        Returns:
            The first rank's result, which must be small and picklable.
        """
        result, failure = used(tensors, use) if self.is_here else used(tensors, lambda _: None)
        shared = failure
        if failure is not None and not isinstance(failure, RuntimeError):
            shared = RuntimeError(f"{doing} failed on the first rank: {type(failure).__name__}: {failure}")
        shared, received = self.object((shared, result))
        if shared is not None:
            raise shared from None if shared is failure else failure
        return cast(T, received)

    def from_all(self, value: Any) -> list[Any]:
        """Returns the values of all ranks that hold the module; small and picklable ones. Collective."""
        values = [value]
        for communicator in reversed(self.steps):
            values = [value for values in communicator.all_gather_object(values) for value in values]
        return values

    def announced(self, values: Any) -> Any:
        """Returns the first rank's values, in containers: tensors with dimensions as `Announced`.

        The values of the other ranks do not count.
        """
        own = pytree.tree_map_only(torch.Tensor, _announced, values) if self.is_here else None
        received = self.object(own)
        return own if self.is_here else received

    def fetched(self, value: Any) -> Any:
        """Returns a value of those with the tensors themselves; collective."""
        return pytree.tree_map_only(Announced, self._tensor, value)

    def _tensor(self, announced: Announced) -> torch.Tensor:
        device = self.steps[0].device if self.steps else torch.device("cpu")
        if announced.own is not None:
            value = announced.own.to(device).contiguous()
        else:
            value = torch.empty(announced.shape, dtype=announced.dtype, device=device)
        for communicator in self.steps:
            communicator.broadcast(value.view(-1).view(torch.uint8) if value.numel() else value)
        return value


class Keepers:
    """One rank for each value, by its key, that keeps it: ranks that write files, say.

    Args:
        ranks: The global ranks.
    """

    def __init__(self, ranks: Mapping[Any, int]) -> None:
        self._ranks = ranks
        self._here = dist.get_rank() if dist.is_initialized() else 0

    def wants(self, value: FullValue) -> bool:
        """Whether this rank keeps a value that is gathered."""
        return self._ranks[value.key] == self._here

    def rank_in(self, value: FullValue) -> int | None:
        """Returns the one rank of the value's communicator that receives it; None if all do."""
        return sorted(value.communicator.members).index(self._ranks[value.key])

    def in_turns(self, values: Sequence[FullValue]) -> list[FullValue]:
        """Returns the values that ranks here gather, those of one keeper in order, the keepers in turns."""
        by_keeper: dict[int, list[FullValue]] = {}
        for value in values:
            by_keeper.setdefault(self._ranks[value.key], []).append(value)
        rows = zip_longest(*by_keeper.values())
        # Chosen after that: all ranks must gather in one order what several groups gather together.
        return [value for row in rows for value in row if value is not None and self._takes_part(value)]

    def _takes_part(self, value: FullValue) -> bool:
        """Whether ranks here gather a value: they may be another copy's, whose keeper has its own."""
        alone = value.communicator.size == 1
        return value.part is not None or alone or self._ranks[value.key] in value.communicator.members


def used(tensors: Iterator[Named], use: Callable[[Iterator[Named]], T]) -> tuple[T | None, Exception | None]:
    """Lets this rank use tensors that it gathers; it takes part in all gathers even if that fails.

    Returns:
        The result, and what was raised by using them. What a gather raises is raised, as on other ranks.
    """
    own: list[Exception] = []
    result, failure = None, None
    try:
        result = use(_noting(tensors, own))
    except Exception as error:
        if error in own:
            raise
        failure = error
    for _ in tensors:
        pass
    return result, failure


def _noting(tensors: Iterator[Named], errors: list[Exception]) -> Iterator[Named]:
    """Yields tensors, and notes the error that ends them."""
    try:
        yield from tensors
    except Exception as error:
        errors.append(error)
        raise


def _beside(all_buffers: Iterable[Buffers]) -> list[Communicator]:
    """Returns communicators with the ranks that hold other parts of parameters (tensor parallelism)."""
    for buffers in all_buffers:
        for part in (
            part for sharded in buffers.params for part in sharded.distributed or () if part is not None
        ):
            device, mesh = buffers.communicator.device, part.mesh
            groups = (mesh.get_group(dim) for dim in range(mesh.ndim) if dim not in part.own)
            return [make_communicator(ranks_in(group), device) for group in groups]
    return []


def _announced(tensor: torch.Tensor) -> Any:
    return Announced(tensor.shape, tensor.dtype, tensor) if tensor.dim() > 0 else tensor.cpu()
