"""Replica groups by torchft itself: one is killed, the other goes on, and the killed one heals.

Slow, and needs `pip install "fsdp-wrap[elastic]"`; test_replica_groups.py has what needs neither.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from fronts import each_front, full_state
from fsdp_wrap.replica_groups import join_replica_groups
from replica_managers import Manager, sharded
from resuming import net, train
from state_nets import adamw, assert_close

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.group_kills import Group, lighthouse, told, wait_for

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow

FLAGS = "--layers 1 --width 16 --context 16 --global-batch 8 --timeout 20"


def started(number: int, folder: Path, *flags: str) -> Group:
    script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *FLAGS.split(), *flags]
    cores = sorted(os.sched_getaffinity(0))
    return Group([sys.executable, *script], 2, folder / f"group{number}.log", cores)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} little words that one can learn by heart, " * 20)
    return folder


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


def averaged(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


@each_front
@ranks(4)
def test_local_sgd_averages_shards_of_groups_that_trained_apart(rank, world_size, front):
    from torchft.local_sgd import LocalSGD

    manager = Manager()
    model = sharded(front, net(), rank)
    optimizer = adamw(model)
    join_replica_groups(manager, model, optimizer, average_gradients=False)
    with LocalSGD(manager, model, optimizer, sync_every=2):
        train(model, optimizer, rank, world_size, range(4))
    plain = [net() for _ in range(2)]
    theirs = [adamw(each) for each in plain]
    for start in (0, 2):
        for group in range(2):
            train(plain[group], theirs[group], group, 2, range(start, start + 2))
        mean = averaged(plain)
        for each in plain:
            each.load_state_dict(mean)
    assert_close(full_state(model), mean)


@each_front
@ranks(4)
def test_diloco_steps_by_what_groups_have_moved(rank, world_size, front):
    from torchft.local_sgd import DiLoCo

    manager = Manager()
    model = sharded(front, net(), rank)
    optimizer = adamw(model)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    join_replica_groups(manager, model, optimizer, average_gradients=False)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=2):
        train(model, optimizer, rank, world_size, range(4))
    whole = net()
    theirs_outer = torch.optim.SGD(whole.parameters(), 0.7, momentum=0.9, nesterov=True)
    plain = [net() for _ in range(2)]
    theirs = [adamw(each) for each in plain]
    for start in (0, 2):
        for group in range(2):
            train(plain[group], theirs[group], group, 2, range(start, start + 2))
        mean = averaged(plain)
        for name, param in whole.named_parameters():
            param.grad = param.detach() - mean[name]
        theirs_outer.step()
        for each in plain:
            each.load_state_dict(whole.state_dict())
    assert_close(full_state(model), whole.state_dict())
