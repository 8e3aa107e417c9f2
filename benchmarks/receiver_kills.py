"""Kills the receiver of a trainer's weights at seeded moments, and tells what that cost.

Two ranks train; a third process follows their weights in bf16, by `examples/lm/weight_channel.py`: all of
them once, then what changed after each step. It is killed at any moment, mostly while it takes something.
Another one is started, and gets all weights when it is there; training does not wait for it. At the end the
receiver must hold the bits of the trainers, and these must be where a run without receivers ends.
`benchmarks.kills` is the command.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import run_ranks
from benchmarks.implementations import Trained
from benchmarks.models import CASES
from benchmarks.victims import PATIENCE, ROOT, Event, free_port
from examples.lm.weight_channel import Pair, PeerLost, WeightSender
from fsdp_wrap import weight_changes, weight_source
from fsdp_wrap.weights import checksum

RECEIVER = "receiver"
DTYPE = torch.bfloat16
STEP_SECONDS = 0.05
"""Added to a step, so that there are not too many until another receiver has started."""

GAP = (2, 10)
"""Updates that a receiver gets before it is killed, at least and at most."""


class Link:
    """The first rank's receivers, one after the other, and the channel to the one that is there."""

    def __init__(self, chosen: random.Random) -> None:
        self._chosen = chosen
        self._pool = ThreadPoolExecutor(1)
        self.start()

    def start(self) -> None:
        """Starts a receiver; its channel is there later."""
        where = f"localhost:{free_port()}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.following", where],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._opening: Future[Pair] = self._pool.submit(Pair, where, receives=False, timeout=PATIENCE)

    def opened(self) -> Pair | None:
        """Returns the channel to the receiver, once, when it has come."""
        if self._opening.cancelled() or not self._opening.done():
            return None
        channel, self._opening = self._opening.result(), Future()
        self._opening.cancel()
        return channel

    def kill_soon(self) -> None:
        """Kills the receiver at a moment of the next steps."""
        Timer(self._chosen.uniform(0, 0.1), self.process.kill).start()


class Trainer:
    """A rank that trains and tells a receiver what changed; the first one has the link."""

    def __init__(self, link: Link | None, count: int, chosen: random.Random) -> None:
        self.trained = Trained("fsdp_wrap", CASES["small"])
        self._link, self._left, self._chosen = link, count, chosen
        self._engine: WeightSender | None = None
        self._changes = weight_changes(self.trained.model, DTYPE)
        self._source = weight_source(self.trained.model, dtype=DTYPE)
        self.events: list[dict[str, Any]] = []
        self.ends: list[float] = []
        self._updates, self._moment, self._killed = 0, 0, False

    def run(self) -> None:
        """Trains until so many receivers were killed and the last one has all."""
        while self._step():
            pass

    def _step(self) -> bool:
        self.trained.step()
        time.sleep(STEP_SECONDS)
        collected = self._changes.collect()
        channel = self._link.opened() if self._link is not None else None
        over = self._left == 0 and self._engine is not None and not self._killed
        told: list[Any] = [channel is not None, over]
        dist.broadcast_object_list(told)
        comes, over = told
        try:
            if comes:
                self._connected(channel)
            elif self._engine is not None:
                self._engine.send_changes(collected)
                self._updates += 1
        except PeerLost as error:
            self._lost(error)
        self.ends.append(time.time())
        self._kill_if_due()
        return not over

    def _connected(self, channel: Pair | None) -> None:
        """Lets all ranks gather all weights for a receiver that has come."""
        self._engine = WeightSender(channel)
        self._engine.send(self._source)
        if self._link is not None:
            self._killed, self._updates, self._moment = False, 0, self._chosen.randint(*GAP)
            if self.events:
                self.events[-1]["back"] = time.time()
                print(f"{len(self.events)} receivers were killed", file=sys.stderr, flush=True)

    def _lost(self, error: PeerLost) -> None:
        """Starts another receiver, on the first rank, when one is gone."""
        self._engine = None
        if self._link is None:
            return
        assert self._killed, error
        self.events.append({"step": len(self.ends) + 1})
        self._link.process.wait()
        self._link.start()

    def _kill_if_due(self) -> None:
        due = self._engine is not None and not self._killed and self._updates >= self._moment
        if self._link is not None and due and self._left:
            self._killed, self._left = True, self._left - 1
            self._link.kill_soon()

    def finish(self) -> dict[str, int]:
        """Ends the receiver, on the first rank; returns its checksums."""
        assert self._engine is not None and self._link is not None
        self._engine.close()
        said, _ = self._link.process.communicate(timeout=PATIENCE)
        return dict(json.loads(said))


def train(count: int, seed: int) -> dict[str, Any]:
    """Returns events, number of steps, loss, and whether the bits are equal; called on every rank."""
    chosen = random.Random(seed)
    link = Link(chosen) if dist.get_rank() == 0 else None
    trainer = Trainer(link, count, chosen)
    try:
        trainer.run()
        own = {name: checksum(value) for name, value in weight_source(trainer.trained.model, dtype=DTYPE)}
        theirs = trainer.finish() if link is not None else {}
    finally:
        if link is not None:
            link.process.kill()
    ends = trainer.ends
    for event in trainer.events:
        around = ends[max(event["step"] - 3, 0) : event["step"] + 2]
        event["seconds"] = max(b - a for a, b in zip(around, around[1:]))
        event["away"] = event.pop("back") - ends[event["step"] - 2]
    result = {"events": trainer.events, "steps": len(ends), "loss": trainer.trained.loss}
    return {**result, "equal": own == theirs}


def train_alone(steps: int) -> float:
    """Returns the loss of the last step of a run without a receiver; called on every rank."""
    trained = Trained("fsdp_wrap", CASES["small"])
    for _ in range(steps):
        trained.step()
    return trained.loss


def disturbed(count: int, seed: int) -> tuple[list[Event], bool]:
    """Kills so many receivers; returns the events, and whether the rest is as if nobody had been killed."""
    run = run_ranks(train, 2, count, seed)
    alone = run_ranks(train_alone, 2, run["steps"])
    events = [
        Event(RECEIVER, event["step"], event["step"], event["seconds"], 2, event["away"])
        for event in run["events"]
    ]
    return events, run["equal"] and run["loss"] == alone
