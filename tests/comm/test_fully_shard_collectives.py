"""The collectives of `fully_shard`'s layout, among 128 ranks that are threads of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bed.threads import threads_as_ranks
from fsdp_wrap._comm.lanes import Finished
from fsdp_wrap._comm.objects import all_gather_single, reduce_scatter_single
from fsdp_wrap._comm.process_group import SoloCommunicator
from fsdp_wrap._core.modules import ParamPlaces, ParamSlot
from fsdp_wrap._core.precision import SegmentPolicy
from fsdp_wrap._params.dtensor import DTensorLayout
from fsdp_wrap._params.handle import HandleState, ParamHandle
from fsdp_wrap._params.held_by import HeldBy
from fsdp_wrap._params.parallel import DataMesh
from fsdp_wrap.api import MixedPrecision

RANKS = 128
SHAPES = [(17, 257), (17,), (64, 312), (64,), (64, 64), (512, 64), (256,), (64, 297)]


class ThreadCommunicator(SoloCommunicator):
    """The collectives that a handle uses, among threads."""

    def __init__(self, group: Any) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Any:
        fill()
        for tensor in full:
            all_gather_single(tensor, self.own_part(tensor).clone(), group=self._group)
        return Finished()

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Any:
        for shard, source in zip(shards, full):
            reduce_scatter_single(shard, source, group=self._group)
        return Finished()


@functools.cache
def originals() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def handle_of(policy: MixedPrecision, mesh: DeviceMesh) -> tuple[ParamHandle, nn.ParameterList]:
    module = nn.ParameterList([nn.Parameter(value.clone()) for value in originals()])
    slots = [ParamSlot(str(index), param, ParamPlaces(module)) for index, param in enumerate(module)]
    for index, slot in enumerate(slots):
        slot.places.add(module, str(index))
    communicator = ThreadCommunicator(mesh.get_group())
    layout = DTensorLayout(
        slots, communicator, mesh=DataMesh(mesh), dims=[0] * len(slots), name="all", offload=False, pin=False
    )
    policies = [SegmentPolicy.of(policy)]
    alone = SoloCommunicator(communicator.device)
    handle = ParamHandle([layout], communicator, alone, policies, HeldBy.everyone())
    handle.follow_requires_grad()
    return handle, module


def check_gather(handle: ParamHandle, module: nn.ParameterList, dtype: torch.dtype, within: Any) -> None:
    for keeps in (within, None):
        handle.gather()
        assert handle.state is HandleState.UNSHARDING
        handle.wait()
        handle.shown.show_leaves()
        for param, value in zip(module, originals()):
            assert type(param) is nn.Parameter
            assert torch.equal(param, value.to(dtype))
        assert handle.reshard(keeps)
        assert (handle.post_forward_shards is not None) == (keeps is not None)
        assert all(isinstance(param, DTensor) for param in module)


def gradients(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * (rank % 3) for shape in SHAPES]


def reduce(handle: ParamHandle, grads: list[torch.Tensor]) -> None:
    segment = handle.segments[0]
    handle.gather()
    handle.wait()
    for index, grad in enumerate(grads):
        segment.leaves[index].grad = grad.to(segment.dtypes.param)
    handle.start_reduction()
    handle.finish_reduction()
    handle.reshard()


def check_reduced(module: nn.ParameterList, rank: int, expected: list[Any], **tolerance: Any) -> None:
    for param, wanted in zip(module, expected):
        assert param.grad.placements == (Shard(0),) and param.grad.shape == param.shape
        chunks = wanted.chunk(RANKS)
        mine = chunks[rank] if rank < len(chunks) else wanted[:0]
        torch.testing.assert_close(param.grad.to_local(), mine, **tolerance)
        param.grad = None


@pytest.mark.slow
def test_gathers_and_reductions_of_odd_shapes_at_128_ranks():
    of_ranks = [gradients(rank) for rank in range(RANKS)]
    means = [sum(grads) / RANKS for grads in zip(*of_ranks)]
    extremes = [torch.full(shape, value) for shape, value in zip(SHAPES, [4096.0, 2.0**-20] * 4)]

    def body(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.arange(RANKS))
        within = ThreadCommunicator(DeviceMesh("cpu", torch.arange(RANKS).view(-1, 8)).get_group(1))
        for dtype in (torch.float32, torch.bfloat16):
            check_gather(*handle_of(MixedPrecision(param_dtype=dtype), mesh), dtype, within)
        handle, module = handle_of(MixedPrecision(), mesh)
        reduce(handle, of_ranks[rank])
        for param, wanted in zip(module[:2], means):
            torch.testing.assert_close(param.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-4)
        check_reduced(module, rank, means, rtol=1e-5, atol=1e-4)
        handle, module = handle_of(MixedPrecision(reduce_dtype=torch.float16), mesh)
        reduce(handle, of_ranks[rank])
        check_reduced(module, rank, means, rtol=1e-2, atol=1e-2)
        reduce(handle, extremes)  # neither overflow nor underflow
        check_reduced(module, rank, extremes, rtol=0, atol=0)

    with threads_as_ranks(RANKS) as run:
        run(body)
