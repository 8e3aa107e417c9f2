"""`join_replica_groups`: copies of a sharded model that a manager keeps equal, and one that heals.

First a manager averages over pairs of ranks, as torchft's does over groups that it finds by itself. Then
comes torchft itself, from the extra `elastic`: slow, and with kills.
"""

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import ranks
from bed.paths import ROOT
from fronts import either_front, full_state
from fsdp_wrap.replica_groups import join_replica_groups
from partly_used import Partly
from replica_managers import SHARDS, Manager, sharded
from resuming import net, other, train, trained
from state_nets import adamw, assert_close, assert_equal

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.group_kills import Group, lighthouse, told, wait_for
from models import gather_objects


def joined(front: str, rank: int, **options: Any) -> tuple[Manager, torch.nn.Module, torch.optim.Optimizer]:
    model, manager = sharded(front, net(), rank), Manager()
    optimizer = adamw(model)
    join_replica_groups(manager, model, optimizer, **options)
    return manager, model, optimizer


@either_front
@ranks(4)
def test_groups_train_as_one_and_a_group_that_was_away_heals(rank, world_size, front):
    manager, model, optimizer = joined(front, rank)
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
    again = sharded(front, other(net()), rank)  # groups are made by all
    if rank >= SHARDS:
        model = again
        optimizer = adamw(model)
        manager.states.clear()
        join_replica_groups(manager, model, optimizer)
    manager.heal(rank)
    train(model, optimizer, rank, world_size, range(4, 6))
    train(plain, theirs, 0, 1, range(4, 6))
    assert_close(full_state(model), plain.state_dict())
    states = gather_objects(manager.states["fsdp_wrap"][1]())
    assert_equal(states[rank]["model"], states[(rank + SHARDS) % world_size]["model"])
    one, two = (states[source]["optim"]["state"] for source in (rank, (rank + SHARDS) % world_size))
    assert one and one.keys() == two.keys()
    for number, entry in one.items():
        assert all(torch.equal(value, two[number][key]) for key, value in entry.items())


@either_front
@ranks(4)
def test_a_parameter_counts_as_used_if_any_group_has_used_it(rank, world_size, front):
    """Ranks 0 and 1, of the first group, each use a parameter that nobody else does; one is unused."""
    torch.manual_seed(3)
    plain, manager = Partly().double(), Manager()
    model = sharded(front, copy.deepcopy(plain), rank)
    optimizer, theirs = adamw(model), adamw(plain)
    join_replica_groups(manager, model, optimizer)
    for _ in range(2):
        model(rank).backward()
        (sum(map(plain, range(world_size))) / world_size).backward()
        for stepped in (optimizer, theirs):
            stepped.step()
            stepped.zero_grad()
    assert_close(full_state(model), plain.state_dict())


@either_front
@ranks(4)
def test_without_gradients_only_states_are_the_managers(rank, world_size, front):
    """As for LocalSGD and DiLoCo, which average parameters."""
    manager, model, optimizer = joined(front, rank, average_gradients=False)
    train(model, optimizer, rank % SHARDS, SHARDS, range(2))
    assert manager.averaged == [] and list(manager.states) == ["fsdp_wrap"]
    plain, _ = trained(2)
    assert_close(full_state(model), plain.state_dict())


@ranks(4)
def test_what_cannot_join_is_refused_by_name(rank, world_size):
    plain = net()
    with pytest.raises(ValueError, match="no module of Net is sharded"):
        join_replica_groups(Manager(), plain, adamw(plain))
    manager, model, optimizer = joined("composable", rank)
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


FLAGS = "--layers 1 --width 16 --context 16 --global-batch 8 --timeout 20"


def needs_torchft(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft")(test))


def started(number: int, folder: Path, *flags: str) -> Group:
    script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *FLAGS.split(), *flags]
    cores = sorted(os.sched_getaffinity(0))
    return Group([sys.executable, *script], 2, folder / f"group{number}.log", cores)


@needs_torchft
@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_a_group_that_was_killed_heals_while_the_other_goes_on(front, tmp_path, text, monkeypatch):
    flags = ("--front", front, "--steps", "100000", "--data", str(text))
    with lighthouse(join_ms=200, heartbeat_ms=1000) as address, contextlib.ExitStack() as stack:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        living = started(0, tmp_path, *flags)
        stack.callback(living.stop)
        assert wait_for(living, 1, 1)  # the group that comes first begins at the first step
        dying = started(1, tmp_path, *flags)
        stack.callback(dying.stop)
        assert wait_for(dying, 0, least_groups=2)
        time.sleep(0.5)
        dying.stop()
        last = told(dying)[-1]["step"]
        assert wait_for(living, last + 20, 1)
        dying.log.unlink()
        dying.start()
        first = wait_for(dying, 0, least_groups=2)
        assert first and wait_for(dying, first["step"] + 10, 1)
    lived, healed = told(living), told(dying)
    steps = [line["step"] for line in lived]
    assert steps == list(range(1, steps[-1] + 1))  # none is lost, none is taken twice
    assert {line["groups"] for line in lived} == {1, 2}
    assert healed[0]["step"] > last + 20  # it did not begin anew
    sums = {line["step"]: line["checksum"] for line in lived}
    common = [line for line in healed if line["step"] in sums and line["groups"] == 2]
    assert len(common) >= 9
    assert all(line["checksum"] == sums[line["step"]] for line in common)


class Plain:
    """Two groups that train apart, and what they have on average after every second step."""

    def __init__(self) -> None:
        self.groups = [net() for _ in range(2)]
        self._optimizers = [adamw(group) for group in self.groups]

    def means(self) -> Iterator[dict[str, torch.Tensor]]:
        for start in (0, 2):
            for group, (model, optimizer) in enumerate(zip(self.groups, self._optimizers)):
                train(model, optimizer, group, 2, range(start, start + 2))
            states = [model.state_dict() for model in self.groups]
            yield {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for model in self.groups:
            model.load_state_dict(state)


@needs_torchft
@either_front
@ranks(4)
def test_groups_that_trained_apart_meet_by_local_sgd_and_by_diloco(rank, world_size, front):
    """The first averages their shards, the second steps by what they have moved."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    models = []
    for way in (LocalSGD, DiLoCo):
        manager, model, optimizer = joined(front, rank, average_gradients=False)
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        given = [model, optimizer] if way is LocalSGD else [[model], optimizer, outer]
        with way(manager, *given, sync_every=2):
            train(model, optimizer, rank, world_size, range(4))
        models.append(model)

    plain = Plain()
    for mean in plain.means():
        plain.load(mean)
    assert_close(full_state(models[0]), mean)

    plain, whole = Plain(), net()
    outer = torch.optim.SGD(whole.parameters(), 0.7, momentum=0.9, nesterov=True)
    for mean in plain.means():
        for name, param in whole.named_parameters():
            param.grad = param.detach() - mean[name]
        outer.step()
        plain.load(whole.state_dict())
    assert_close(full_state(models[1]), whole.state_dict())
