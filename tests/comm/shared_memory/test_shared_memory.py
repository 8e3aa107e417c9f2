"""Memory shared by the ranks of one host: the process group's results, waits in any order, and no traces."""

import contextlib
import gc
import math
import mmap
import os
import resource
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import fronts
from bed import ranks
from collectives import DTYPES, check_gathers_and_sums, check_others, values
from forks import run_forks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap._comm import select as _communicators
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.messages import ExchangeCommunicator
from fsdp_wrap._comm.process_group import GroupCommunicator
from fsdp_wrap._comm.select import make_communicator
from fsdp_wrap._comm.shared_memory import automatic as _automatic
from fsdp_wrap._comm.shared_memory import channel as _channel
from fsdp_wrap._comm.shared_memory import memory as _shared_memory
from fsdp_wrap._comm.shared_memory.automatic import AutomaticCommunicator
from fsdp_wrap._comm.shared_memory.channel import Board
from fsdp_wrap._comm.shared_memory.host import HostCommunicator
from fsdp_wrap._comm.shared_memory.lending import Lending, Lent
from fsdp_wrap._comm.shared_memory.memory import HEADER, PeerMemory, SharedBuffer, SharedMemory, own_memory
from fsdp_wrap._comm.shared_memory.signals import wait_until
from fsdp_wrap._core import EventKind, record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")
lends = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="with torch 2.11 ranks lend nothing and copy"
)
ALLOWED = mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="1")  # also where all other tests run over gloo


def sharing(group: dist.ProcessGroup | None = None) -> HostCommunicator:
    group = group or dist.group.WORLD
    ranks = Ranks(group, dist.get_rank(group), dist.get_world_size(group))
    best = AutomaticCommunicator(ranks, CPU, math.inf)._best
    assert isinstance(best, HostCommunicator)
    return best


@ranks(3)
def test_all_collectives(rank, world_size):
    communicator = sharing()
    summed = [dtype for dtype in DTYPES if not dtype.is_complex]
    check_gathers_and_sums(communicator, summed, in_order=True)
    for dtype in summed:
        every = [values(77, dtype, other) for other in range(world_size)]
        reduced, most = every[rank].clone(), torch.stack([value.double() for value in every]).amax(0)
        if dtype.itemsize > 1 or not dtype.is_floating_point:
            communicator.all_reduce([reduced], dist.ReduceOp.MAX).wait()
            assert torch.equal(reduced.double(), most), dtype
    with mock.patch.object(dist, "all_to_all_single", forbidden):
        check_others(communicator)


@ranks(2)
def test_waits_in_any_order_and_never(rank, world_size):
    """Collectives complete in whatever order ranks wait, on full pipes as well; memory comes back."""
    communicator = sharing()
    memory = communicator._channel.memory
    levels = []
    for numel in (8, 8, 400, 40_000):
        full = [torch.empty(2 * numel) for _ in range(200)]
        shards = [torch.empty(numel) for _ in full]
        pending = []
        for number, (whole, shard) in enumerate(zip(full, shards)):
            part, grads = own(whole), torch.full((2 * numel,), float(number))
            gathered = communicator.all_gather([whole], partial(part.fill_, number + rank))
            pending += [gathered, communicator.reduce_scatter([shard], [grads])]
        order = range(len(pending)) if rank else reversed(range(len(pending)))
        for index in order:
            if index % 40 != 6:  # a few are given up
                pending[index].wait()
        for number, (whole, shard) in enumerate(zip(full, shards)):
            if 2 * number % 40 != 6:
                assert whole[0] == number and whole[-1] == number + 1
            assert (shard == 2 * number).all()
        del pending
        gc.collect()
        dist.barrier()
        memory._collect()
        levels.append(sum(memory._taken.values()) - sum(memory._taken))
    assert len(set(levels[1:])) == 1  # before, an earlier group may still be about to go


@ranks(2)
def test_who_is_far_ahead_waits_and_who_never_waited_is_told(rank, world_size):
    communicator = sharing()
    numbers = [torch.full((1,), float(number + rank)) for number in range(_channel._POSTS + 100)]
    first = _channel._POSTS if rank else 0
    pending = [communicator.all_reduce([number]) for number in numbers[:first]]
    if rank:
        with pytest.raises(RuntimeError, match="wait for some before issuing more"):
            communicator.all_reduce([torch.ones(1)])
        posted = communicator._channel.peers[0].board.words
        while posted[0] < first:  # which the bed ends
            time.sleep(0.01)
        time.sleep(0.2)  # the other one has come as far, and finds no room
        assert posted[0] == first
    for work in pending:
        work.wait()
    for number in numbers[first:]:
        communicator.all_reduce([number]).wait()
    assert [int(number) for number in numbers] == [2 * index + 1 for index in range(len(numbers))]


def own(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(2)[dist.get_rank()]


def net() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(40, 3))


def trained(wrap, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(6, 40)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def wrapped(**options):
    def wrap(net: nn.Module) -> FSDP:
        with ALLOWED:
            return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)

    return wrap


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_training_is_bit_equal_to_ddp_and_gloo(rank, world_size, strategy):
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    expected = trained(DistributedDataParallel)
    by_gloo = trained(wrapped(**options, shared_memory=False))
    with mock.patch.object(dist, "all_reduce", forbidden), mock.patch.object(dist, "broadcast", forbidden):
        shared = trained(wrapped(**options))
    assert torch.equal(torch.stack(shared), torch.stack(expected))
    assert torch.equal(torch.stack(shared), torch.stack(by_gloo))
    assert isinstance(_automatic._chosen[dist.group.WORLD], HostCommunicator)


def forbidden(*args, **kwargs):
    raise AssertionError("this goes through the process group")


@ranks(4)
def test_hybrid_groups_and_sums_in_order_of_ranks(rank, world_size):
    """Each group has its channel; all ranks get the same bits, whichever come first."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (pairs[rank // 2], across[rank % 2])
    hybrid = {"process_group": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    by_gloo = trained(wrapped(**hybrid, shared_memory=False))
    shared = trained(wrapped(**hybrid))
    torch.testing.assert_close(shared, by_gloo, rtol=1e-5, atol=1e-6)
    assert all(isinstance(_automatic._chosen[group], HostCommunicator) for group in groups)

    communicator = sharing()
    torch.manual_seed(rank)
    numbers = torch.randn(5001)
    every = communicator.all_gather_object(numbers)
    time.sleep(0.01 * (world_size - rank))
    total = numbers.clone()
    communicator.all_reduce([total]).wait()
    assert torch.equal(total, every[0] + every[1] + every[2] + every[3])
    shard, padded = torch.empty(1251), torch.cat([numbers, torch.zeros(3)])
    communicator.reduce_scatter([shard], [padded]).wait()
    assert torch.equal(shard, communicator.own_part(torch.cat([total, torch.zeros(3)])))


@contextlib.contextmanager
def refused_on_the_second(rank: int, patched: object, name: str) -> Iterator[list[str]]:
    """Lets a call of the host fail on the second rank; yields the warnings about shared memory."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as told:
        if rank == 1:
            stack.enter_context(mock.patch.dict(_shared_memory._own, clear=True))
            stack.enter_context(mock.patch.object(patched, name, side_effect=OSError("no such call")))
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
    texts += [str(warning.message) for warning in told if "share memory" in str(warning.message)]


@ranks(2)
def test_where_one_rank_may_not_share_memory_one_warns_and_gloo_is_used(rank, world_size):
    """If it only cannot map memory privately, all still share it, without that."""
    with refused_on_the_second(rank, _shared_memory, "PrivateMap") as texts:
        assert not sharing()._lending.possible
        losses = trained(wrapped())
    assert not texts
    group = dist.new_group()
    with refused_on_the_second(rank, os, "memfd_create") as texts:
        model = wrapped(process_group=group)(net())
        assert "float32, through shared memory where ranks share a host\n" in repr(model)
        by_gloo = trained(wrapped(process_group=group))
    assert "shared memory" not in repr(model)
    assert len(texts) == (1 if rank == 0 else 0)
    assert all("rank 1: OSError: no such call" in text for text in texts)
    assert type(_automatic._chosen[group]) is ExchangeCommunicator
    for ours in (losses, by_gloo):
        assert torch.equal(torch.stack(ours), torch.stack(trained(DistributedDataParallel)))


@lends
@ranks(2)
def test_a_gather_that_was_begun_anew_is_refused(rank, world_size):
    """A rank that has written to the piece announced first cannot compute with the second."""
    communicator = sharing()
    buffer = SharedBuffer(20_000, torch.float32, own_memory())
    buffer.free()
    if rank == 0:
        with pytest.raises(ValueError, match="unreadable"):
            communicator.gather_into([buffer], mock.Mock(side_effect=ValueError("unreadable")))
    dist.barrier()
    gather = communicator.gather_into([buffer], lambda: None) if rank == 1 else None
    dist.barrier()
    if rank == 0:
        communicator.gather_into([buffer], lambda: None).wait()
    else:
        with pytest.raises(RuntimeError, match="began a gather, failed, and began it anew"):
            gather.wait()


@ranks(2)
def test_who_uses_it(rank, world_size, monkeypatch):
    world = Ranks(dist.group.WORLD, rank, world_size)

    def chosen(gloo=None, memory=None, **options):
        for name, value in ("FSDP_WRAP_GLOO", gloo), ("FSDP_WRAP_SHARED_MEMORY", memory):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        made = make_communicator(world, CPU, **options)
        assert made == GroupCommunicator(world, CPU)
        return type(made)

    assert chosen() is chosen("plain") is chosen(memory="1") is AutomaticCommunicator
    assert chosen(memory="0") is chosen(shared_memory=False) is ExchangeCommunicator
    assert chosen("exchange", "0") is ExchangeCommunicator
    assert chosen("plain", "0") is chosen("plain", shared_memory=False) is GroupCommunicator
    with pytest.raises(ValueError, match='FSDP_WRAP_SHARED_MEMORY must be "0" or "1" or not be set'):
        chosen(memory="no")
    with pytest.raises(ValueError, match='^FSDP_WRAP_GLOO must be "plain" or "exchange"'):
        monkeypatch.setenv("FSDP_WRAP_GLOO", "fast")
        FSDP(nn.Linear(2, 2), shared_memory=False)
    with mock.patch.object(_communicators, "_MOST_RANKS", 1):  # undone in the rank, unlike by `monkeypatch`
        assert chosen(memory="0") is GroupCommunicator


@ranks(2)
def test_who_uses_it_says_so(rank, world_size):
    """In the events of what travels, in the wrapper's repr; torch's own counter of collectives sees both."""
    for shared in (True, False):
        for front in ("flat", "composable"):
            with ALLOWED:
                model = fronts.shard(front, net(), ModuleWrapPolicy({nn.Linear}), shared_memory=shared)
            with record_events() as events, CommDebugMode() as counter:
                model(torch.randn(6, 40)).sum().backward()
            travelled = [event for event in events if event.kind in (EventKind.UNSHARD, EventKind.REDUCE)]
            assert len(travelled) >= 10
            assert {event.way for event in travelled} == {"shared memory" if shared else ""}
            assert {event.way for event in events if event not in travelled} == {""}
            assert counter.comm_counts[torch.ops.c10d._allgather_base_] >= 5
            assert counter.comm_counts[torch.ops.c10d._reduce_scatter_base_] == 5
            if front == "flat":
                assert repr(model).count("float32, through shared memory\n") == (5 if shared else 0)


@lends
@ranks(3)
def test_all_compute_with_one_copy_and_what_one_writes_there_is_its_own(rank, world_size):
    communicator = sharing()
    buffers = [SharedBuffer(world_size * 5001, torch.float32, own_memory()) for _ in range(3)]
    parts = [communicator.own_part(buffer.data) for buffer in buffers]
    for buffer in buffers:
        buffer.free()

    def gather(index: int, value: float) -> None:
        communicator.gather_into([buffers[index]], lambda: parts[index].fill_(value + rank)).wait()

    def holds(index: int, value: float) -> bool:
        expected = torch.arange(world_size).add(value).repeat_interleave(5001)
        return torch.equal(buffers[index].data, expected.to(torch.float32))

    def live() -> int:
        dist.barrier()
        own_memory()._collect()
        return live_bytes()

    levels = []
    for turn in range(20):
        for index in range(3):
            gather(index, 10.0 * turn + index)
        assert all(holds(index, 10.0 * turn + index) for index in range(3))
        buffers[2].data[rank::world_size].mul_(3)
        time.sleep(0.005 * rank)  # the lender goes on
        assert all(holds(index, 10.0 * turn + index) for index in range(2))
        for index in (0, 2, 1) if rank else (1, 0, 2):
            buffers[index].free()
        levels.append(live())
    assert len(set(levels[2:])) == 1, levels  # before, an earlier group may still be about to go

    pending = communicator.gather_into([buffers[0]], lambda: None)
    (pending.wait if rank == 0 else object)()  # the others give it up
    del pending
    buffers[0].free()
    assert live() == levels[-1]

    gather(0, 7.0)
    gather(1, 8.0)
    assert holds(0, 7.0)
    buffers[0].keep_alone()  # so that gradients may be written there, which all read
    assert holds(0, 7.0) and own_memory().find(buffers[0].data) is not None
    communicator.all_gather_object(0)
    buffers[0].data.fill_(rank)
    shard = torch.empty(5001)
    communicator.reduce_scatter([shard], [buffers[0].data]).wait()
    assert (shard == sum(range(world_size))).all()
    buffers.clear()
    parts.clear()
    gc.collect()
    assert live() <= levels[-1], "what is no longer used is given back, allocated or not"


def live_bytes() -> int:
    return sum(own_memory()._taken.values()) - sum(own_memory()._taken)


@ranks(2)
def test_different_collectives_are_refused(rank, world_size):
    communicator = sharing()
    communicator.all_gather_object(0)
    tensor = torch.ones(4 + 2 * rank)
    if rank == 0:
        pending = communicator.all_reduce([tensor])
    else:
        pending = communicator.all_gather([tensor], lambda: None)
    for _ in range(2):  # it stays failed
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} takes part in") as caught:
            pending.wait()
        assert all(what in str(caught.value) for what in ("ALL_GATHER of", "ALL_REDUCE of"))


@ranks(2)
def test_a_wait_that_was_interrupted_does_not_take_something_else(rank, world_size):
    communicator = sharing()
    while communicator._channel.next_number <= _channel._POSTS:  # until the board has something everywhere
        communicator.all_gather([torch.zeros(2)], lambda: None).wait()
    pending = communicator.all_gather([torch.ones(2)], lambda: None)
    with mock.patch.object(communicator._channel, "read", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    with pytest.raises(RuntimeError, match="was interrupted"):
        pending.wait()
    assert communicator.all_gather_object(rank) == [0, 1]


@lends
@ranks(2)
def test_a_fork_neither_takes_part_nor_disturbs_its_parent(rank, world_size):
    """Memory that a fork frees, allocates and gives up is not its parent's."""
    gc.collect()
    communicator = sharing()
    communicator.all_gather_object(0)
    assert number_lent() == 0
    buffer = SharedBuffer(100_000, torch.float32, own_memory())
    buffer.free()
    buffer.allocate()
    buffer.data.fill_(7)
    other = SharedBuffer(100_000, torch.float32, own_memory())
    other.free()
    common = SharedBuffer(100_000, torch.float32, own_memory())
    communicator.gather_into([common], lambda: communicator.own_part(common.data).fill_(5)).wait()
    pending = communicator.all_gather([torch.empty(200_000)], lambda: None)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            del pending
            buffer.free()
            common.free()
            other.allocate()
            other.data.fill_(3)
            own_memory().tensor(8192, 1 << 20).fill_(9)
            with pytest.raises(RuntimeError, match="forked process"):
                communicator.gather_into([common], lambda: None)
            with pytest.raises(RuntimeError, match="forked process"):
                communicator.all_gather_object(1)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (buffer.data == 7).all()
    assert not communicator._channel.peers[1 - rank].board.is_read(3, rank)
    pending.wait()
    communicator.all_gather_object(0)  # the other's fork has ended as well
    assert number_lent() == (1 if rank == 0 else 0), "the other one computes with it"
    assert communicator.all_gather_object(rank) == [0, 1]


def number_lent() -> int:
    """Returns how many pieces peers compute with."""
    posted = [is_read for of_piece in own_memory()._posted.values() for is_read in of_piece]
    return sum(isinstance(getattr(is_read, "__self__", None), Lent) and not is_read() for is_read in posted)


def test_pieces_of_memory_are_reused_and_given_back(monkeypatch):
    monkeypatch.setattr(_shared_memory, "_KEPT", 64 << 20)
    memory = SharedMemory()
    whole = [*memory._free, (memory._size, memory._size + (100 << 20) + HEADER)]  # of a map of its own
    pieces = {memory.take(nbytes): nbytes for nbytes in (1, 5000, (100 << 20) + 1, 4096)}
    assert len(pieces) == 4 and min(pieces) >= 4096
    for begin, nbytes in pieces.items():
        memory.tensor(begin, nbytes).fill_(7)
    assert [memory.find(memory.tensor(begin + HEADER, 1)) for begin in pieces] == list(pieces)
    before = os.fstat(memory.door).st_blocks * 512
    assert before >= 100 << 20
    for begin in sorted(pieces, key=lambda begin: begin * 7919 % 1009):
        memory.give_back(begin)
    memory._collect()
    assert memory._free == whole
    assert os.fstat(memory.door).st_blocks * 512 <= 64 << 20
    assert memory.take(5000) == min(pieces)
    read: list[int] = []
    memory.note(min(pieces), lambda: bool(read))
    memory.give_back(min(pieces))
    assert memory.take(5000) > min(pieces), "somebody may read there"
    read.append(1)
    assert memory.take(5000) == min(pieces)
    with pytest.raises(RuntimeError, match="are left of the memory"):
        memory.take(1 << 60)


def test_a_board_tells_which_ranks_have_left():
    memory = SharedMemory()
    board = Board(memory, memory.take(Board.nbytes(3)), 3)
    board.clear()
    board.leave(1)
    assert [board.has_left(rank) for rank in range(3)] == [False, True, False]
    board.leave(2)
    assert [board.has_left(rank) for rank in range(3)] == [False, True, True]
    assert board.is_over(0) and not board.is_over(1)


class PostsWhenAsked:
    """A process that posts while another one looks whether it has ended."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def ended(self) -> bool:
        self._words[0] += 1
        return False


def test_a_wait_sees_what_came_before_its_end_and_while_it_slept():
    memory = SharedMemory()
    place = memory.take(4096)
    words = memory.words(place, 1)
    words[0] = 0
    life: Any = PostsWhenAsked(words)
    begun = time.perf_counter() - 1.0  # and has looked for a post since
    assert not wait_until(words, memory.address(place), 1, life, begun, 0.5)
    assert wait_until(words, memory.address(place), 1, life, begun, 600.0) and words[0] == 1
    assert wait_until(words, memory.address(place), 1, life, begun, 0.5)


def test_memory_is_lent_to_as_many_ranks_as_a_header_has_words():
    most = HEADER // 8
    for size, lends, possible in ((most, True, True), (most + 1, True, False), (2, False, False)):
        channel: Any = SimpleNamespace(lends=lends, size=size, rank=0, memory=None)
        assert Lending(channel).possible == possible


def traces() -> int:
    """Descriptors and maps of this process that have to do with shared memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("pidfd" in link or "memfd:fsdp_wrap" in link for link in links) + sum(
        "memfd:fsdp_wrap" in line for line in lines
    )


def test_what_lies_in_memory_stays_there_when_it_grows():
    """Both in this process and in a peer, which finds new memory when it looks there."""
    memory = SharedMemory()
    peer = PeerMemory(os.getpid(), memory.door, memory.word)
    sizes = [5000, 20 << 20, 10 << 20, 3000, 40 << 20, 1 << 20, 90 << 20]
    pieces = [(memory.take(HEADER + nbytes), nbytes) for nbytes in sizes]
    written, seen = [], []
    for number, (begin, nbytes) in enumerate(pieces):
        written.append(memory.tensor(begin + HEADER, nbytes).fill_(number))
        seen.append(peer.tensor(begin + HEADER, nbytes))
        assert memory.find(written[-1]) == begin and memory.offset(written[-1]) == begin + HEADER
        assert memory.address(begin + HEADER) == written[-1].data_ptr()
    for number, (here, there) in enumerate(zip(written, seen)):
        assert (here[::1000] == number).all() and (there[::1000] == number).all()
    assert memory._size <= 2 * sum(sizes)
    for begin, _ in pieces:
        memory.give_back(begin)
    assert memory.take(90 << 20) == pieces[-1][0], "nothing lies across the end of a map"


def address_space() -> int:
    """Bytes of address space that this library's maps take."""
    taken = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fsdp_wrap" in line:
            begin, _, end = line.partition(" ")[0].partition("-")
            taken += int(end, 16) - int(begin, 16)
    return taken


def take_as_needed(rank, world_size):
    """A small model takes little address space, a large one what it needs, later groups none."""
    trained(wrapped())
    small = address_space()
    large = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(3)))
    with ALLOWED:
        model = FSDP(large, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model(torch.ones(1, 2000)).sum().backward()
    grown = address_space()
    measured = []
    for count in (1, 1, 8, *[1] * 30):
        groups = [dist.new_group() for _ in range(count)]
        before = traces()
        for group in groups:
            with ALLOWED:
                model = FSDP(nn.Linear(200, 200), process_group=group)
            model(torch.ones(1, 200)).sum().backward()
        assert count == 1 or traces() == before, "groups share descriptors and maps"
        dist.barrier()
        while groups:
            dist.destroy_process_group(groups.pop())
        del model, group
        gc.collect()
        dist.barrier()  # all have left it
        own_memory()._collect()
        measured.append((address_space(), traces(), live_bytes()))
    return small, grown, measured


def train_with_limit(rank, world_size, spare):
    """With about as much address space as the host has memory; a tensor takes most of it afterwards."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (memory + spare, memory + spare))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = trained(wrapped())
    torch.empty(memory // 2, dtype=torch.uint8)
    texts = [str(warning.message) for warning in told if "share memory" in str(warning.message)]
    return [loss.item() for loss in losses], texts


def lack_address_space(rank, world_size):
    """One rank may not map what the file of the other has grown by, or what its own is to grow by."""
    communicator = sharing()
    communicator.all_gather_object(0)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + (48 << 20)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    dist.barrier()
    part = torch.ones((100 << 20) if rank == 0 else 0, dtype=torch.uint8)
    own = communicator._channel.show(part, in_place=False) if rank == 0 else 0
    begin = communicator.broadcast_object(own)
    if rank == 1:
        cure = ".*ulimit -v.*FSDP_WRAP_SHARED_MEMORY=0 on all ranks"
        with pytest.raises(RuntimeError, match=f"cannot map .* more {cure}"):
            communicator._channel.peers[0].board.memory.tensor(begin, 5)
        with pytest.raises(RuntimeError, match=f"no .* bytes are left {cure}"):
            own_memory().take(100 << 20)
    dist.barrier()
    assert communicator.all_gather_object(rank) == [0, 1]


@lends
def test_address_space_is_taken_as_it_is_needed():
    for end in run_forks(take_as_needed, [()], world_size=2)[0]:
        small, grown, measured = end.value
        assert small <= 4 * _shared_memory._LEAST  # each rank's file, and privately what the first one lends
        assert small + (16 << 20) <= grown <= small + (4 * 4 * 16 << 20)  # three units of 16 MB at most
        assert measured[-1] == measured[2], "of other groups nothing stays, and in their place lie later ones"


def test_address_space_is_left_for_others_and_too_little_is_told_as_such():
    spares = [16 << 30, -(1 << 30)]
    for spare, ends in zip(spares, run_forks(train_with_limit, [(left,) for left in spares], world_size=2)):
        for rank, end in enumerate(ends):
            losses, told = end.value
            assert losses[-1] < losses[0]
            assert len(told) == (1 if rank == 0 and spare < 0 else 0)
            assert all("less is left than" in text for text in told)
    run_forks(lack_address_space, [()], world_size=2)
