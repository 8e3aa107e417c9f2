"""Which device a unit computes on, also where torch was compiled for an accelerator that is absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from fronts import each_front, either_front, shard
from fsdp_wrap import CPUOffload, CPUOffloadPolicy, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler

absent = pytest.mark.skipif(torch.accelerator.is_available(), reason="about hosts without an accelerator")


@contextmanager
def having(name: str, count: int) -> Iterator[None]:
    """Pretends that there are so many accelerators; nothing can be put on them.

    Without any, as torch's wheel for CUDA on a host without a GPU: there is a name, and no device.
    """

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available and not count else torch.device(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        if count:
            patch.setattr(torch.accelerator, "device_count", lambda: count)
        yield


def _train(model: nn.Module) -> None:
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@absent
@either_front
@ranks(2)
def test_an_accelerator_that_is_compiled_in_but_absent_is_none(rank, world_size, front):
    with having("cuda", 0):
        for offload in (False, True):
            model = shard(front, nn.Linear(4, 4), cpu_offload=CPUOffload(offload))
            _train(model)
            assert {param.device.type for param in model.parameters()} == {"cpu"}
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        model = shard(front, module)
        if front == "composable":
            model.to_empty(device="cpu")
            model.reset_parameters()
        _train(model)


@absent
@ranks(2)
def test_a_device_that_is_not_there_is_refused(rank, world_size):
    module, mesh = nn.Linear(4, 4), init_device_mesh("cuda", (world_size,))
    on_host = CPUOffloadPolicy()
    for device_id in ("cuda", "cuda:1", torch.device("cuda", 0), "xpu", "meta"):
        with having("cuda", 0), pytest.raises(ValueError, match="device_id names the device") as refusal:
            FSDP(module, device_id=device_id)  # type: ignore[arg-type]
        for told in (f"'{device_id}'", f"rank {rank} finds no accelerator", "device_id must name 'cpu'"):
            assert told in str(refusal.value)
    for present, make, said in (
        (
            False,
            lambda: fully_shard(module, mesh=mesh, offload_policy=on_host),
            "^mesh names the device 'cuda'",
        ),
        (False, lambda: FSDP(module, device_mesh=mesh), "^device_mesh names the device 'cuda', which is not"),
        (True, lambda: FSDP(module, device_id=2), "'xpu:2'.* finds 2 of type 'xpu'.*from 'xpu:0' to 'xpu:1'"),
        (
            True,
            lambda: FSDP(module, device_id=torch.device("hpu:0")),
            "'hpu:0'.* finds 'xpu' but.*must name 'xpu' or 'cpu'",
        ),
    ):
        with having("xpu", 2) if present else having("cuda", 0), pytest.raises(ValueError, match=said):
            make()
    with (
        having("cuda", 0),
        pytest.raises(ValueError, match=f"device_id=0 is the number.* rank {rank} finds none"),
    ):
        FSDP(module, device_id=0)
    assert type(module) is nn.Linear and type(module.weight) is nn.Parameter
    _train(FSDP(module, device_id=torch.device("cpu")))


@absent
def test_a_scaler_for_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device names the device 'xpu'"):
        ShardedGradScaler(device="xpu")
    with pytest.warns(UserWarning, match="CUDA is not available"):  # as in torch, whose default it is
        assert not ShardedGradScaler().is_enabled()
    assert not ShardedGradScaler(device="xpu", enabled=False).is_enabled()


@each_front
@ranks(2)
def test_the_default_device_is_the_users(rank, world_size, front):
    """Tensors made beside the user's lie where they belong, whatever the default device is."""
    for offload in (False, True):
        torch.set_default_device(None)
        module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.ones(2, 4)
        torch.set_default_device("meta")
        model = shard(front, module, cpu_offload=CPUOffload(offload))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        model.load_state_dict(state)
        if front != "composable":
            with FSDP.summon_full_params(model, writeback=True, offload_to_cpu=True, rank0_only=True):
                pass
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert torch.isfinite(model(x)).all()
