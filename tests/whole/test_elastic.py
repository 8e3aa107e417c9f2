"""Training that outlives its hosts, under torchrun's elastic agent: what goes on, from where, to what end.

Also a receiver of weights that dies and comes back, and what the command that kills draws.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bed.paths import ROOT
from bed.patience import NEVER, until
from warm import warm

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import receiver_kills

sys.path.insert(0, str(ROOT / "examples"))

from lm.data import Corpus, Share

from benchmarks.host_kills import ALL_HOSTS, HOST, RANK, Run, disturbed, launcher, run_on
from benchmarks.victims import Host, cores_of

TINY = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --warmup 2 --eval-windows 8 --sample 4"
LONG = f"{TINY} --steps 80 --checkpoint-every 5 --global-batch 8"


def test_a_step_has_the_same_windows_for_any_number_of_ranks(text):
    """Each once; all ranks run equally many forwards; the mean over ranks is that over the windows."""
    corpus = Corpus.load(text, 16)
    expected, _ = corpus.batch("step 3", 7, 16)
    for ranks in (1, 2, 3, 5, 9):
        found, weights = [], 0.0
        for rank in range(ranks):
            share = Share(rank, ranks, global_batch=7, batch=2)
            parts = [*share.windows(corpus, "step 3", 16)]
            assert len(parts) == share.forwards == math.ceil(math.ceil(7 / ranks) / 2)
            for (inputs, targets), count in parts:
                assert 0 < len(inputs) <= 2 and torch.equal(inputs[:, 1:], targets[:, :-1])
                found.append(inputs[:count])
                weights += count * share.scale / ranks
        assert torch.equal(torch.cat(found), expected), ranks
        assert weights == pytest.approx(1)


@pytest.mark.slow
def test_a_run_goes_on_by_itself_at_the_ranks_that_are_left(text, tmp_path):
    """Of two hosts one goes for good, later a rank of the other; the end is that of an undisturbed run."""
    script = [str(ROOT / "examples" / "train_lm.py"), *LONG.split(), "--data", str(text)]
    undisturbed = json.loads(warm(1, *script).out.splitlines()[-1])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saved, log = tmp_path / "checkpoints", tmp_path / "run.log"
    command = [*launcher(store, 2, 1, last_call=2), *script, "--checkpoint", str(saved), "--elastic"]
    hosts = [Host(command, tmp_path / f"memory{number}", log, cores_of(number, 2)) for number in range(2)]
    try:
        wait_for(saved, 10)
        hosts[1].stop()
        newest = wait_for(saved, 15 + max(steps(saved)))  # alone
        hosts[0].lose(RANK, random.Random(0))
        wait_for(saved, newest + 5)
        assert hosts[0].agent.wait(timeout=NEVER) == 0, log.with_suffix(".err").read_text()[-3000:]
    finally:
        for host in hosts:
            host.stop()
    report = json.loads(log.read_text().splitlines()[-1])
    assert report["step"] == 80
    assert report["val_loss"] == pytest.approx(undisturbed["val_loss"], rel=1e-3)  # other sums, rounded
    assert json.loads((saved / "run.json").read_text())["global batch"] == 8


def steps(saved: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in saved.glob("step_*")] or [0]


def wait_for(saved: Path, step: int) -> int:
    until(lambda: max(steps(saved)) >= step)
    return max(steps(saved))


@pytest.mark.slow
def test_a_lost_host_costs_no_more_than_the_steps_since_the_copy(text, tmp_path):
    """Of one host: all comes from the memory of the other. Of both: from the disk. The end is the same."""
    flags = ("--memory", tmp_path / "quiet", "--steps", 50, "--width", 32, "--data", text)
    quiet = warm(2, ROOT / "examples" / "elastic.py", *flags)
    undisturbed = json.loads(quiet.out.splitlines()[-1])
    assert undisturbed["step"] == 50
    options = argparse.Namespace(
        hosts=2, ranks=1, lose_at_most=5, steps=50, disk_every=10, width=32, data=text, seed=0
    )
    with run_on(options, tmp_path / "memory", tmp_path / "disk") as run:
        events, loss = disturbed(run, options.steps, (HOST, ALL_HOSTS), random.Random(1))
        ways = [(0, "the beginning"), (events[0].resumed, "memory"), (events[1].resumed, "disk")]
        assert resumptions(run) == ways
    assert [event.kind for event in events] == [HOST, ALL_HOSTS]
    assert events[0].resumed >= 3 and events[0].ranks == 2
    assert 0 <= events[0].lost <= options.lose_at_most
    assert 0 <= events[1].lost <= options.disk_every
    assert loss == undisturbed["loss"]
    assert not any((tmp_path / "memory").glob("*/step_*"))  # freed in the end


def resumptions(run: Run) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in run.log.read_text().splitlines() if line.startswith("{")]
    return [(line["resumed"], line["from"]) for line in lines if "resumed" in line]


@pytest.mark.slow
def test_a_receiver_that_is_killed_costs_no_step_and_the_next_one_has_all():
    """The trainers' bits are those of a run without receivers, and the last receiver has them."""
    events, same = receiver_kills.disturbed(1, seed=3)
    assert [event.lost for event in events] == [0]
    assert events[0].seconds < events[0].away
    assert same
