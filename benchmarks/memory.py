"""Memory by phase: at rest, and the peaks of forward and backward above that.

python -m benchmarks.memory --impl fsdp1,fsdp2,fsdp_wrap --cases mlp
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_fake, run_ranks
from benchmarks.implementations import DEFAULTS, IN_PLACE, SHARDING, SHARED, Trained
from benchmarks.meters import Lap, resident, resident_on_host, tensors
from benchmarks.models import SHORT_CASES, TINY, Case, largest_block

FAKE_RANKS = 8
Meter = Callable[[Callable[[], object]], Lap]


def phases(name: str, case: Case, meter: Meter = tensors) -> dict[str, float]:
    """Returns megabytes at rest, and peaks above the sharded state in blocks; called on every rank."""
    return _phases(lambda: Trained(name, case), largest_block(case), meter)


def _phases(make: Callable[[], Trained], block: int, meter: Meter) -> dict[str, float]:
    held: list[Trained] = []
    losses = []

    def build() -> None:
        trained = make()
        trained.step()
        trained.step()
        trained.optimizer.zero_grad()
        gc.collect()
        held.append(trained)

    rest = meter(build)
    forward = meter(lambda: losses.append(held[0].forward()))
    backward = meter(lambda: losses.pop().backward())
    more = rest.kept - sharded_state(held[0])
    return {
        "rest MB": rest.kept / 1e6,
        "peak MB": _peak(rest, forward, backward) / 1e6,
        "forward": (more + forward.peak) / block,
        "backward": (more + forward.kept + backward.peak) / block,
        "above gradients": (backward.peak - backward.kept) / block,
    }


def phases_of(make: Callable[[], Trained], case: Case) -> dict[str, float]:
    """Returns the same for a model that is made otherwise, by its tensors."""
    return _phases(make, largest_block(case), tensors)


def resident_phases(name: str, case: Case) -> dict[str, float]:
    """Returns the same in the kernel's account, and megabytes of all ranks together; called on every rank."""
    host: list[Lap] = []

    def meter(action: Callable[[], object]) -> Lap:
        building = not host  # whose peak nobody asks for
        return resident(lambda: host.append(resident_on_host(action, watched=not building)))

    figures = phases(name, case, meter)
    return {**figures, "host rest MB": host[0].kept / 1e6, "host peak MB": _peak(*host) / 1e6}


def _peak(rest: Lap, forward: Lap, backward: Lap) -> int:
    """Returns the most bytes at any time in a step."""
    return rest.kept + max(forward.peak, forward.kept + backward.peak)


def sharded_state(trained: Trained) -> int:
    """Counts the bytes of this rank's parameters and optimizer state."""
    state = [value for entry in trained.optimizer.state.values() for value in entry.values()]
    local = [getattr(value, "_local_tensor", value) for value in (*trained.model.parameters(), *state)]
    storages = (value.untyped_storage() for value in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(case: str, names: list[str]) -> Table:
    """Returns the phases of each implementation in the kernel's account; called on every rank."""
    names = SHORT_CASES[case].taken_by(names)
    for name in names:
        resident_phases(name, TINY)  # the first use of anything loads code
    return {name: resident_phases(name, SHORT_CASES[case]) for name in names}


def measure_fake(case: str, names: list[str]) -> Table:
    """Returns the phases of each implementation by its tensors; called on a fake group."""
    return {name: phases(name, SHORT_CASES[case]) for name in SHORT_CASES[case].taken_by(names)}


def ask(settings: Settings) -> Figures:
    """Returns two tables a case: resident memory over gloo (not for lora), and tensors on a fake group."""
    names = settings.implementations([*DEFAULTS, IN_PLACE, *SHARED.values()])
    # What shares memory keeps segments for the next to use: each has processes of its own.
    alone = [[name] for name in names if name in SHARED.values()]
    others = [name for name in names if [name] not in alone]
    figures = {}
    for case in settings.cases_of([*SHORT_CASES], usual=["gpt", "mlp", "lora"]):
        if case != "lora" or "lora" in settings.cases:
            figures[f"{case}, resident"] = {
                name: row
                for together in (others, *alone)
                for name, row in run_ranks(measure, settings.ranks, case, together).items()
            }
        sharding = [name for name in names if name in SHARDING]
        figures[f"{case}, fake group"] = run_fake(measure_fake, FAKE_RANKS, case, sharding)
    return figures


QUESTION = Question(
    "memory",
    "Memory",
    f"""\
Of one rank: `rest MB` is held after two steps and zero_grad; `peak MB` is the most at any time in a forward
and backward. `forward`, `backward`: peaks above the sharded state (parameters and optimizer state), in
blocks of the model. Gradients of the sharded parameters count, and so does all else that an implementation
keeps at rest. `above gradients`: the backward's peak above what is held after it, so gradients count as
state. Batches are small (mlp: 4 rows; gpt and lora: 1 sequence of 16 tokens), because activations are the
same for all. `resident`: memory of whole processes as the kernel counts it, with gloo's buffers and all
threads, without Python and its libraries; 2 ranks. `host` is all ranks together, shared pages counted once,
sampled about every 10 ms. `fake group`: live tensors, exactly, at {FAKE_RANKS} ranks that send nothing;
lora is measured so alone. Through shared memory (`_shared`) buffers stay for the next step: they count as
`rest`, for each rank that maps them.""",
    ask,
    chart="backward",
    cases=[*SHORT_CASES],
    implementations=[*DEFAULTS, IN_PLACE, *SHARED.values()],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
