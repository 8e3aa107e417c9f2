"""Memory by phase: at rest, and the peaks of forward and backward above that.

python -m benchmarks.memory --impl fsdp1,fsdp2,fsdp_wrap --cases mlp
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_fake, run_ranks
from benchmarks.implementations import DEFAULTS, IN_PLACE, SHARDING, Trained
from benchmarks.meters import Lap, resident, tensors
from benchmarks.models import SHORT_CASES, TINY, Case, largest_block

FAKE_RANKS = 8
METERS = {"tensors": tensors, "resident": resident}


def phases(name: str, case: Case, meter: Callable[[Callable[[], object]], Lap]) -> dict[str, float]:
    """Called on every rank: megabytes at rest, and peaks above the sharded state in blocks."""
    held: list[Trained] = []

    def build() -> None:
        each = Trained(name, case)
        each.step()
        each.step()
        each.optimizer.zero_grad()
        gc.collect()
        held.append(each)

    rest = meter(build).kept
    losses = []
    forward = meter(lambda: losses.append(held[0].forward()))
    backward = meter(lambda: losses.pop().backward())
    block, more = largest_block(case), rest - sharded_state(held[0])
    return {
        "rest MB": rest / 1e6,
        "forward": (more + forward.peak) / block,
        "backward": (more + forward.kept + backward.peak) / block,
        "above gradients": (backward.peak - backward.kept) / block,
    }


def sharded_state(each: Trained) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    state = [value for entry in each.optimizer.state.values() for value in entry.values()]
    local = [getattr(value, "_local_tensor", value) for value in (*each.model.parameters(), *state)]
    storages = (value.untyped_storage() for value in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(case_name: str, names: list[str], meter: str) -> Table:
    """Called on every rank: the phases of each implementation."""
    case = SHORT_CASES[case_name]
    names = case.taken_by(names)
    for name in names if meter == "resident" else ():
        phases(name, TINY, METERS[meter])  # the first use of anything loads code
    return {name: phases(name, case, METERS[meter]) for name in names}


def ask(settings: Settings) -> Figures:
    """Three tables a case: by either meter over gloo, and of tensors on a fake group."""
    names = settings.implementations([*DEFAULTS, IN_PLACE])
    sharding = [name for name in names if name in SHARDING]
    figures = {}
    for case in settings.cases_of([*SHORT_CASES], usual=["gpt", "mlp", "lora"]):
        for meter in METERS:
            figures[f"{case}, {meter}"] = run_ranks(measure, settings.ranks, case, names, meter)
        figures[f"{case}, fake group"] = run_fake(measure, FAKE_RANKS, case, sharding, "tensors")
    return figures


QUESTION = Question(
    "memory",
    "Memory",
    f"""\
`rest MB`: all that is held after two steps and zero_grad. `forward`, `backward`: peaks above the sharded
state, which is the parameters and the optimizer's state, in blocks of the model: gradients of the sharded
parameters count as they come, and so does what else an implementation keeps at rest. `above gradients`: the
backward's peak above what is held after it, so gradients count as state. Batches are small (mlp's 4 rows;
for gpt and lora 1 sequence of 16 tokens), since activations are the same for all. `tensors` is exact but
sees only the training thread's tensors; `resident` is the kernel's account of the whole process, buffers of
gloo included; both at 2 ranks over gloo. `fake group`: tensors at {FAKE_RANKS} ranks that send nothing.""",
    ask,
    chart="backward",
)


def main() -> None:
    ask_alone(QUESTION)


if __name__ == "__main__":
    main()
