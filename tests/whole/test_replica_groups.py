"""`join_replica_groups`: copies of a sharded model that a manager keeps equal, and one that heals.

The manager here averages over pairs of ranks, as torchft's does over groups that it finds by itself;
`test_torchft.py` has the real one, with kills.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fronts import full_state
from fsdp_wrap.replica_groups import join_replica_groups
from replica_managers import SHARDS, Manager, sharded
from resuming import net, other, train, trained
from state_nets import adamw, assert_close, assert_equal

each_api = pytest.mark.parametrize("front", ["orig", "composable"])


@each_api
@ranks(4)
def test_groups_train_as_one_and_a_group_that_was_away_heals(rank, world_size, front):
    model = sharded(front, net(), rank)
    optimizer = adamw(model)
    manager = Manager()
    join_replica_groups(manager, model, optimizer)
    train(model, optimizer, rank, world_size, range(2))
    plain, theirs = trained(2)
    assert_close(full_state(model), plain.state_dict())

    # The second group is gone. The first one takes all rows.
    manager.alone = True
    if rank < SHARDS:
        train(model, optimizer, rank, SHARDS, range(2, 4))
    train(plain, theirs, 0, 1, range(2, 4))
    if rank < SHARDS:
        assert_close(full_state(model), plain.state_dict())

    # It comes back with another model that was never stepped, and is healed.
    manager.alone = False
    if rank >= SHARDS:
        model = sharded_again(front, rank)
        optimizer = adamw(model)
        manager.states.clear()
        join_replica_groups(manager, model, optimizer)
    else:
        sharded_again(front, rank)  # groups are made by all
    manager.heal(rank)
    train(model, optimizer, rank, world_size, range(4, 6))
    train(plain, theirs, 0, 1, range(4, 6))
    assert_close(full_state(model), plain.state_dict())
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, manager.states["fsdp_wrap"][1]())
    assert_equal(states[rank]["model"], states[(rank + SHARDS) % world_size]["model"])
    one, two = (states[each]["optim"]["state"] for each in (rank, (rank + SHARDS) % world_size))
    assert one and one.keys() == two.keys()
    for number, entry in one.items():
        assert all(torch.equal(value, two[number][key]) for key, value in entry.items())


def sharded_again(front: str, rank: int) -> nn.Module:
    return sharded(front, other(net()), rank)


@each_api
@ranks(4)
def test_without_gradients_only_states_are_the_managers(rank, world_size, front):
    """As for LocalSGD and DiLoCo, which average parameters."""
    model = sharded(front, net(), rank)
    optimizer = adamw(model)
    manager = Manager()
    join_replica_groups(manager, model, optimizer, average_gradients=False)
    train(model, optimizer, rank % SHARDS, SHARDS, range(2))
    assert manager.averaged == [] and list(manager.states) == ["fsdp_wrap"]
    plain, _ = trained(2)
    assert_close(full_state(model), plain.state_dict())


@ranks(4)
def test_what_cannot_join_is_refused_by_name(rank, world_size):
    manager = Manager()
    plain = net()
    with pytest.raises(ValueError, match="no module of Net is sharded"):
        join_replica_groups(manager, plain, adamw(plain))
    model = sharded("composable", net(), rank)
    optimizer = adamw(model)
    join_replica_groups(manager, model, optimizer)
    with pytest.raises(RuntimeError, match="have a hook already"):
        join_replica_groups(Manager(), model, optimizer)
    load, give = manager.states["fsdp_wrap"]
    before = full_state(model)
    state = give()
    name = next(name for name, tensor in state["model"].items() if tensor.dim() > 0)
    state["model"][name] = state["model"][name][:0]
    with pytest.raises(ValueError, match=rf"must shard alike, but of {name} this rank holds shape"):
        load(state)
    assert_equal(full_state(model), before)
