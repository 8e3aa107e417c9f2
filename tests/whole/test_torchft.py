"""Replica groups by torchft itself: one is killed, the other goes on, and the killed one heals.

Slow, and needs `pip install "fsdp-wrap[elastic]"`; test_replica_groups.py has what needs neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from benchmarks.group_kills import lighthouse
from fronts import each_front, full_state
from fsdp_wrap.replica_groups import join_replica_groups
from replica_managers import Manager, sharded
from resuming import net, train
from state_nets import adamw, assert_close

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow

LIMIT = 120.0
FLAGS = "--layers 1 --width 16 --context 16 --global-batch 8 --timeout 20"


class Group:
    """A replica group of two ranks under torchrun."""

    def __init__(self, number: int, folder: Path, lighthouse: str, *flags: str) -> None:
        self.log = folder / f"group{number}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *FLAGS.split(), *flags]
        with self.log.open("ab") as out, self.log.with_suffix(".err").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *script],
                stdout=out,
                stderr=errors,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "TORCHFT_LIGHTHOUSE": lighthouse,
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,
            )

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def wait_for(self, what: str, value: int) -> None:
        until = time.monotonic() + LIMIT
        while not any(line[what] >= value for line in self.steps()):
            assert self.process.poll() is None and time.monotonic() < until, self.errors()
            time.sleep(0.02)

    def errors(self) -> str:
        return self.log.with_suffix(".err").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} little words that one can learn by heart, " * 20)
    return folder


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_a_group_that_was_killed_heals_while_the_other_goes_on(front, tmp_path, text):
    flags = ("--front", front, "--steps", "100000", "--data", str(text))
    with lighthouse(join_ms=200, heartbeat_ms=1000) as address, contextlib.ExitStack() as stack:
        living, dying = (Group(number, tmp_path, address, *flags) for number in (0, 1))
        stack.callback(living.kill)
        stack.callback(lambda: dying.kill())
        living.wait_for("groups", 2)
        time.sleep(0.5)
        dying.kill()
        last = dying.steps()[-1]["step"]
        living.wait_for("step", last + 20)
        dying.log.unlink()
        dying = Group(1, tmp_path, address, *flags)
        dying.wait_for("groups", 2)
        dying.wait_for("step", dying.steps()[0]["step"] + 10)
    lived, healed = living.steps(), dying.steps()
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
