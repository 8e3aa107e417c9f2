"""What a communicator computes, by whatever way it sends: for tests of all that there are."""

import random
from collections.abc import Iterable
from typing import Any

import torch

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SUMMED = [*FLOATS, torch.int64, torch.int32]
DTYPES = [*SUMMED, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.int8, torch.uint8, torch.bool]
SIZES = [0, 1, 37, 3000, 70_001]
"""Elements a rank: none, within the message, across pages, in messages of their own."""


def values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Returns small whole numbers, whose sums every dtype holds."""
    generator = torch.Generator().manual_seed(numel * 100 + rank)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def check_gathers_and_sums(
    communicator: Any, summed: Iterable[torch.dtype] = SUMMED, in_order: bool = False
) -> None:
    """Checks several tensors at once, in collectives that ranks wait for in different orders, and twice.

    Args:
        communicator: Of this rank.
        summed: The dtypes that it can sum.
        in_order: Whether sums are made in the order of the ranks, in the dtype of the shards.
    """
    rank, size = communicator.rank, communicator.size
    pending, expected = [], []
    for dtype in DTYPES:
        every = [[values(numel, dtype, sender) for numel in SIZES] for sender in range(size)]
        full = [torch.empty(numel * size, dtype=dtype) for numel in SIZES]

        def fill(full: Any = full, own: Any = every[rank]) -> None:
            for target, source in zip(full, own):
                communicator.own_part(target).copy_(source)

        pending.append(communicator.all_gather(full, fill))
        expected += [(target, torch.cat(parts)) for target, *parts in zip(full, *every)]
    for dtype in summed:
        every = [[values(numel * size, dtype, 9 + sender) for numel in SIZES] for sender in range(size)]
        shards = [torch.empty(numel, dtype=dtype) for numel in SIZES]
        pending.append(communicator.reduce_scatter(shards, [tensor.clone() for tensor in every[rank]]))
        totals = [sum(part.float() for part in parts).to(dtype) for parts in zip(*every)]
        expected += zip(shards, map(communicator.own_part, totals))
    # Of what is narrower than the shards, all parts are widened before they are summed.
    for narrow in [kind for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fn) if in_order]:
        for numel in (37, 5000):
            generator = torch.Generator().manual_seed(numel)
            parts = torch.randn(size, size * numel, generator=generator).to(narrow)
            shards = [torch.empty(numel)]
            pending.append(communicator.reduce_scatter(shards, [parts[rank].clone()]))
            expected.append((shards[0], communicator.own_part(sum(part.float() for part in parts))))
    random.Random(rank).shuffle(pending)
    for work in pending:
        work.wait()
        work.wait()  # without effect
    for result, wanted in expected:
        assert result.dtype == wanted.dtype
        assert torch.equal(result.cfloat(), wanted.cfloat()), (result.dtype, result.numel())


def check_others(communicator: Any) -> None:
    """Checks the collectives for which ranks wait at once, among three ranks."""
    rank, size = communicator.rank, communicator.size
    for numel in (5, 5000):
        mine, first = (values(numel, torch.float32, source).view(-1, 5) for source in (rank, 0))
        communicator.broadcast(mine)
        assert torch.equal(mine, first)
        own = values(numel, torch.int32, rank)
        full = torch.empty(numel * size, dtype=torch.int32) if rank == 0 else None
        communicator.gather(own, full)
        if full is not None:
            assert torch.equal(
                full, torch.cat([values(numel, torch.int32, source) for source in range(size)])
            )
        back = torch.empty_like(own)
        communicator.scatter(back, full)
        assert torch.equal(back, own)
        lengths = [numel, 0, 2 * numel]  # of parts
        full = torch.full((sum(lengths),), -1.0)
        communicator.all_gather_parts(full, lengths, lambda part: part.fill_(rank)).wait()
        assert full.tolist() == [0.0] * numel + [2.0] * 2 * numel
        sent = torch.arange(size).repeat_interleave(numel).add(10 * rank).to(torch.uint8)
        received = torch.zeros_like(sent)
        communicator.all_to_all(received, sent).wait()
        wanted = torch.arange(size).repeat_interleave(numel).mul(10).add(rank)
        assert torch.equal(received, wanted.to(torch.uint8))
        value = {"rank": rank, "text": "x" * numel}
        assert [entry["rank"] for entry in communicator.all_gather_object(value)] == [0, 1, 2]
        assert communicator.broadcast_object(value) == {**value, "rank": 0}
