"""Bytes on the wire per rank and step, as the kernel counts them for the ranks' connections.

python -m benchmarks.wire --impl fsdp1,fsdp2,fsdp_wrap --cases gpt,mlp,lora
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_ranks
from benchmarks.implementations import DEFAULTS, IMPLEMENTATIONS, KEEPING, SHARED, Trained
from benchmarks.meters import received
from benchmarks.models import SHORT_CASES, Block, Case, sizes


def travelled(action: Callable[[], object]) -> float:
    """Returns the megabytes that a rank received meanwhile, in the mean of ranks; called on every rank."""
    dist.barrier()  # what came before has arrived
    before = received()
    action()
    dist.barrier()
    mean = torch.tensor(float(received() - before), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size() / 1e6


def measure(case_name: str, names: list[str]) -> Table:
    """Returns megabytes of each implementation's third step, by phase; called on every rank."""
    case = SHORT_CASES[case_name]
    names = case.taken_by(names)
    table = {name: _phases(name, case) for name in names}
    for name in names:
        table[name]["/ needed"] = table[name]["step MB"] / _needed(case)
        if KEEPING.get(name) in table:
            table[name]["reduced MB"] = table[KEEPING[name]]["backward MB"]
    return table


def _phases(name: str, case: Case) -> dict[str, float]:
    trained = Trained(name, case)
    trained.step()
    trained.step()
    trained.optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    forward = travelled(lambda: losses.append(trained.forward()))
    backward = travelled(lambda: losses.pop().backward())
    update = travelled(trained.optimizer.step)
    return {"forward MB": forward, "backward MB": backward, "step MB": forward + backward + update}


def transfers(case: Case) -> list[int]:
    """Returns the bytes of all ranks together that the collectives of a step move at the least.

    These are two gathers of each block, one of the root's other parameters, and a reduction of what trains.
    """
    model = sizes(case)
    blocks = [[*module.parameters()] for module in model.modules() if isinstance(module, Block)]
    inside = {id(param) for block in blocks for param in block}
    root = [param for param in model.parameters() if id(param) not in inside]
    gathers = [*blocks, *blocks, root]
    reductions = [[param for param in unit if param.requires_grad] for unit in (*blocks, root)]
    return [sum(param.nbytes for param in unit) for unit in (*gathers, *reductions)]


def _needed(case: Case) -> float:
    """Returns the megabytes that a rank receives at the least."""
    return (1 - 1 / dist.get_world_size()) * sum(transfers(case)) / 1e6


def ask(settings: Settings) -> Figures:
    """Returns a table a case."""
    figures = {}
    for case in settings.cases_of([*SHORT_CASES], usual=["gpt", "mlp", "lora"]):
        # Those that keep parameters are there for what gradients take where few parameters train.
        more = {"gpt": SHARED.values(), "lora": KEEPING.values()}.get(case, ())
        usual = [*DEFAULTS, *more]
        names = settings.implementations([*IMPLEMENTATIONS] if settings.impl else usual)
        figures[case] = run_ranks(measure, settings.ranks, case, [*dict.fromkeys(names)])
    return figures


QUESTION = Question(
    "wire",
    "Bytes on the wire",
    """\
Megabytes that a rank receives in a step of fp32 training, 2 ranks over gloo: the kernel's counters of the
ranks' own TCP connections, so protocol and control messages count, other processes do not. `/ needed`:
relative to two gathers of the blocks' parameters, one of the root's, which stay until its backward, and one
reduction of those that train. `reduced MB`: of gradients
alone, which is what travels in the backward of the form that keeps parameters after the forward
(`_grad_op`, `_keep`). The models are those of the memory benchmark, since activations do not travel. What
travels through memory that ranks share (`_shared`) is not on the wire, as gpt shows.""",
    ask,
    chart="/ needed",
    cases=[*SHORT_CASES],
    implementations=[*IMPLEMENTATIONS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
