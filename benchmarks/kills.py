"""Kills parts of training runs at seeded moments, and tells what that cost.

python -m benchmarks.kills [--events 50] [--seed 0] [--kinds "trainer rank,agent,host"]

Draws so many kills over the kinds and carries them out: of ranks, agents and hosts in runs of 500 steps with
at most ten kills each (`host_kills`), of receivers of the weights (`receiver_kills`), and of replica groups
(`group_kills`; needs the extra `elastic`). The table has a line for each kind: how many steps were taken
again, and the seconds between the last step before and the first one after. The other lines compare the ends
of runs with those that nobody disturbed. It ends with status 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import group_kills, host_kills, receiver_kills
from benchmarks.harness import preload
from benchmarks.victims import Event, table

KINDS = (*host_kills.KINDS, receiver_kills.RECEIVER, group_kills.GROUP)
OF_A_RUN = 10
APART = 0.01
"""The share of the loss by which a run may differ from an undisturbed one."""

IN_MEMORY = Path("/dev/shm")


def drawn(count: int, kinds: tuple[str, ...], chosen: random.Random) -> list[str]:
    """Draws kinds: all equally often, as far as the number allows, in any order."""
    order = [kinds[number % len(kinds)] for number in range(count)]
    chosen.shuffle(order)
    return order


def of_hosts(
    options: argparse.Namespace, kinds: list[str], chosen: random.Random
) -> tuple[list[Event], float]:
    """Carries out kills of ranks, agents and hosts; returns the events, and how far losses are apart."""
    events: list[Event] = []
    worst = 0.0
    in_memory = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=in_memory) as memory:
        with host_kills.run_on(options, Path(memory, "quiet"), Path(disk, "quiet"), keeps=False) as run:
            _, undisturbed = host_kills.disturbed(run, options.steps, (), chosen)
        print(f"hosts: {undisturbed:.6f} is the loss of step {options.steps}, undisturbed", flush=True)
        while len(events) < len(kinds):
            some = kinds[len(events) : len(events) + OF_A_RUN]
            places = Path(memory, str(len(events))), Path(disk, str(len(events)))
            with host_kills.run_on(options, *places, options.step_seconds) as run:
                kills, loss = host_kills.disturbed(run, options.steps, some, chosen)
            events += kills
            apart = abs(loss - undisturbed) / undisturbed
            worst = max(worst, apart)
            print(f"hosts: {loss:.6f} after {len(kills)} kills, {apart:.4%} apart", flush=True)
    return events, worst


def of_groups(options: argparse.Namespace, count: int, chosen: random.Random) -> tuple[list[Event], float]:
    """Carries out kills of replica groups; likewise."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "disturbed")
        with group_kills.groups_of(options, place, step_seconds=options.step_seconds) as groups:
            events, step, loss = group_kills.disturbed(groups, count, chosen)
        undisturbed = group_kills.undisturbed(options, Path(folder, "quiet"), step)
    apart = abs(loss - undisturbed) / undisturbed
    print(f"replica groups: {loss:.6f} at step {step} after {count} kills, {apart:.4%} apart", flush=True)
    return events, apart


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    names = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--events", type=int, default=50, help="kills in all")
    parser.add_argument("--kinds", type=names, default=KINDS, metavar="A,B", help=", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500, help="of a run of hosts")
    parser.add_argument("--step-seconds", type=float, default=0.06, help="added to a step of disturbed runs")
    parser.add_argument("--lose-at-most", type=int, default=10, help="steps that a lost host may cost")
    parser.add_argument("--disk-every", type=int, default=50, help="steps between saves on disk")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--group-ranks", type=int, default=2, help="of each replica group")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--data", type=Path, help="text; Python's own library if left out")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*KINDS}:
        parser.error(f"--kinds: {', '.join(sorted(unknown))} unknown; there are {', '.join(KINDS)}")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that what was started ends as well
    preload()
    chosen = random.Random(options.seed)
    kinds = drawn(options.events, options.kinds, chosen)
    count = Counter(kinds)
    events: list[Event] = []
    missed: list[str] = []
    if hosts := [kind for kind in kinds if kind in host_kills.KINDS]:
        kills, apart = of_hosts(options, hosts, chosen)
        events += kills
        missed += ["hosts end elsewhere"] if apart > APART else []
    if receivers := count[receiver_kills.RECEIVER]:
        kills, same = receiver_kills.disturbed(receivers, options.seed)
        events += kills
        told = "have the trainers' bits, and these are those of a run without" if same else "differ"
        print(f"receivers: after {receivers} kills they {told}", flush=True)
        missed += [] if same else ["receivers differ"]
    if groups := count[group_kills.GROUP]:
        kills, apart = of_groups(options, groups, chosen)
        events += kills
        missed += ["groups end elsewhere"] if apart > APART else []
    goals = dict.fromkeys(KINDS, 0)
    goals.update(dict.fromkeys((host_kills.RANK, host_kills.AGENT, host_kills.HOST), options.lose_at_most))
    goals[host_kills.ALL_HOSTS] = options.disk_every
    print("\n".join(table(events, goals)))
    missed += [str(event) for event in events if event.lost > goals[event.kind]]
    if missed:
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
