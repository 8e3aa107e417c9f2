"""What `state_over_replicas` refuses, before anything changes, and what it goes with."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_wrap
from bed import ranks
from copies import adamw, both, in_copies, transformer
from fronts import FRONTS, each_form, full_state
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap.comm_hooks import compress
from models import loss_of, tokens

HYBRID = ShardingStrategy.HYBRID_SHARD


@ranks(4)
def test_meshes_without_replicas_or_in_another_order(rank, world_size):
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = DeviceMesh("cpu", [[0, 2], [1, 3]])
    module = nn.Linear(4, 4)
    for wanted, message in (
        (
            flat,
            r"=True of Linear shards state over replicas, and .* has none: pass a mesh \(replicate, shard\)",
        ),
        (mixed, r"=True of Linear counts ranks copy by copy, and these are \[0, 2, 1, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard(module, mesh=wanted, state_over_replicas=True)
    with pytest.raises(
        ValueError, match="of FULL_SHARD shards state over replicas, and there are none: pass"
    ):
        FSDP(module, state_over_replicas=True)
    with pytest.raises(ValueError, match=r"of HYBRID_SHARD counts ranks copy by copy"):
        FSDP(module, device_mesh=mixed, sharding_strategy=HYBRID, state_over_replicas=True)
    pair: Any = (mixed.get_group(1), mixed.get_group(0))
    with pytest.raises(ValueError, match=r"of HYBRID_SHARD counts ranks copy by copy"):
        FSDP(module, process_group=pair, sharding_strategy=HYBRID, state_over_replicas=True)
    stand_in: Any = type("StandIn", (), {"rank": lambda self: 0, "size": lambda self: 2})()
    stand_ins: Any = (stand_in, stand_in)
    with pytest.raises(ValueError, match="needs process groups that communicate, not stand-ins"):
        FSDP(module, process_group=stand_ins, sharding_strategy=HYBRID, state_over_replicas=True)
    options: list[dict[str, Any]] = [{"device_mesh": mesh, "sharding_strategy": HYBRID}, {}]
    not_a_flag: Any = "yes"
    for wrong in options:
        with pytest.raises(TypeError, match="state_over_replicas"):
            FSDP(module, **wrong, state_over_replicas=not_a_flag)
    with pytest.raises(TypeError, match="state_over_replicas"):
        fully_shard(module, mesh=mesh, state_over_replicas=not_a_flag)
    assert type(module) is nn.Linear and not hasattr(module.weight, "_fsdp_flattened")
    assert type(module.weight) is nn.Parameter


class Gather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        raise AssertionError


@ranks(4)
def test_what_would_take_the_place_of_its_collectives(rank, world_size):
    model = in_copies("composable", transformer())
    with pytest.raises(RuntimeError, match=r"=True decides how 'embed\.weight', and what is beside it"):
        compress(model, gathers="int8")
    with pytest.raises(
        RuntimeError, match=r"or state_over_replicas=True does: .* or shard without the other"
    ):
        model.set_custom_all_gather(Gather())
    with pytest.raises(RuntimeError, match="or state over replicas"):
        fsdp_wrap.reproducible(model, micro_batches=4)
    loss_of(model, tokens(rank, 0)).backward()


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.slow
@ranks(4)
def test_ranks_without_a_batch(rank, world_size, front):
    """Inside `uneven` the gradients are those of plain copies."""
    models = both(front)
    for model in models:
        optimizer = adamw(model)
        for number in range(2):
            with fsdp_wrap.uneven(model):
                for batch in range(rank % 3):
                    loss_of(model, tokens(rank, batch + 10 * number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, state = map(full_state, models)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=name)


@each_form
@ranks(4)
def test_hosts_found_by_themselves(rank, world_size, use_orig_params, monkeypatch):
    """Without groups copies lie on hosts, and the state over all ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with (
        pytest.warns(UserWarning, match="sharding within each host")
        if rank == 0
        else contextlib.nullcontext()
    ):
        model = FSDP(
            transformer(),
            sharding_strategy=HYBRID,
            use_orig_params=use_orig_params,
            state_over_replicas=True,
        )
    assert model.process_group is dist.group.WORLD
    loss_of(model, tokens(rank, 0)).backward()
