"""Costs of checkpoints: time, traffic and memory.

    python -m benchmarks.checkpoint --impl fsdp1,fsdp2,fsdp_wrap,fsdp_wrap_flat --cases gpt,small

A checkpoint is the model and its AdamW state after two steps. Measured are `save` and `load` of a sharded
one through `torch.distributed.checkpoint` in a temporary folder on disk, and `full`: the model's full state
dict on the first rank, in host memory where the implementation can do that. `fsdp_wrap_checkpoint` saves and
loads by `fsdp_wrap.checkpoint`: it also syncs what it saves, and verifies it before it loads it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fsdp_wrap
from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import Trained
from benchmarks.meters import tensors
from benchmarks.models import CASES, Case, stacked
from fsdp_wrap import checkpoint

WARMUP = 1
ROUNDS = 3
BASELINES = {"fsdp1": ("fsdp1",), "fsdp2": ("fsdp2",)}
MANY = "5,000 parameters"
SAVED = {**CASES, MANY: stacked(50, 100)}


# --- what is compared ---------------------------------------------------------------------------------


class Checkpoints(Trained):
    """A model and its optimizer; saved, loaded and assembled by torch's functions for state dicts."""

    def save(self, writer: dcp.StorageWriter) -> None:
        """Writes a sharded checkpoint."""
        with self._sharded():
            dcp.save(self._state(), storage_writer=writer)

    def load(self, folder: Path) -> None:
        """Reads a sharded checkpoint into the model and optimizer."""
        with self._sharded():
            state = self._state()
            dcp.load(state, checkpoint_id=folder)
            self._take(state)

    def full(self) -> dict[str, Any]:
        """Returns the model's full state dict on the first rank."""
        options = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return torch_state_dict.get_model_state_dict(self.model, options=options)

    def _sharded(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _state(self) -> dict[str, Any]:
        model, optim = torch_state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def _take(self, state: dict[str, Any]) -> None:
        torch_state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


class WrapperCheckpoints(Checkpoints):
    """The same by the methods of a wrapper of either library, whose names are in the module `api`."""

    def __init__(self, api: Any, offloads: bool, implementation: str, case: Case) -> None:
        super().__init__(implementation, case)
        self._api, self._offloads, self._wrapper = api, offloads, api.FullyShardedDataParallel

    def _sharded(self) -> AbstractContextManager[Any]:
        # By default the optimizer's part goes to the host, which on a CPU is one more copy of it.
        optim_config = self._api.ShardedOptimStateDictConfig(offload_to_cpu=False)
        kind = self._api.StateDictType.SHARDED_STATE_DICT
        return self._wrapper.state_dict_type(self.model, kind, None, optim_config)

    def _state(self) -> dict[str, Any]:
        optim = self._wrapper.optim_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optim": optim}

    def _take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        cut = self._wrapper.optim_state_dict_to_load(self.model, self.optimizer, state["optim"])
        self.optimizer.load_state_dict(cut)

    def full(self) -> dict[str, Any]:
        config = self._api.FullStateDictConfig(offload_to_cpu=self._offloads, rank0_only=True)
        with self._wrapper.state_dict_type(self.model, self._api.StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()


class WholeCheckpoints(WrapperCheckpoints):
    """The same by `fsdp_wrap.checkpoint`: steps, synced to disk and verified before they are loaded."""

    def save(self, writer: dcp.StorageWriter) -> None:
        """Writes a step, the only one in its folder."""
        checkpoint.save(str(writer.checkpoint_id), self.model, self.optimizer, step=1)

    def load(self, folder: Path) -> None:
        """Reads the step into the model and optimizer."""
        checkpoint.load(folder, self.model, self.optimizer)


# On a host without accelerators torch's wrapper crashes where it offloads: it keeps values where they are.
COMPETITORS: dict[str, Callable[[Case], Checkpoints]] = {
    "fsdp1": partial(WrapperCheckpoints, torch_fsdp, False, "fsdp1"),
    "fsdp1_flat": partial(WrapperCheckpoints, torch_fsdp, False, "fsdp1_flat"),
    "fsdp2": partial(Checkpoints, "fsdp2"),
    "fsdp_wrap": partial(WrapperCheckpoints, fsdp_wrap, True, "fsdp_wrap"),
    "fsdp_wrap_flat": partial(WrapperCheckpoints, fsdp_wrap, True, "fsdp_wrap_flat"),
    "fsdp_wrap_checkpoint": partial(WholeCheckpoints, fsdp_wrap, True, "fsdp_wrap"),
}
# Flat parameters cost what original ones do.
USUAL = ["fsdp1", "fsdp2", "fsdp_wrap", "fsdp_wrap_checkpoint"]
BESIDE = {MANY: ["fsdp2", "fsdp_wrap", "fsdp_wrap_checkpoint"]}  # torch's wrapper takes minutes


# --- measuring ----------------------------------------------------------------------------------------


class Travelling(TorchDispatchMode):
    """Counts the bytes of collectives: of tensors, and of objects, which stand for metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0
        self.objects = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            size = max(map(_bytes, (*args, result)), default=0)
            if _for_objects():
                self.objects += size
            else:
                self.tensors += size
        return result


def _bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_iter(argument) if isinstance(leaf, torch.Tensor))


def _for_objects() -> bool:
    """Whether one of torch's object collectives is what issues the present one."""
    return any(
        code.co_filename == dist.distributed_c10d.__file__ and "_object" in code.co_name for code in _stack()
    )


def _stack() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def measure(case_name: str, names: list[str], rounds: int, folder: str) -> dict[str, Any]:
    """Returns seconds by operation and competitor, and bytes by competitor; called on every rank."""
    case = SAVED[case_name]
    competitors = {name: COMPETITORS[name](case) for name in names}
    for competitor in competitors.values():
        competitor.step()
        competitor.step()
    folders = {name: Path(folder, name) for name in names}

    def save(name: str) -> None:
        competitors[name].save(dcp.FileSystemWriter(folders[name], sync_files=False, thread_count=1))

    operations: dict[str, Callable[[str], Any]] = {
        "save": save,
        "load": lambda name: competitors[name].load(folders[name]),
        "full": lambda name: competitors[name].full(),
    }
    times = {
        operation: interleave({name: partial(act, name) for name in names}, rounds, WARMUP)
        for operation, act in operations.items()
    }
    counts = {name: _counts(competitors[name], partial(save, name)) for name in names}
    return {"times": times, "counts": counts}


def _counts(competitor: Checkpoints, save: Callable[[], None]) -> dict[str, float]:
    """Returns megabytes."""
    with Travelling() as travelling:
        save()
    kept: list[dict[str, Any]] = []
    return {
        "tensors sent": travelling.tensors / 1e6,
        "objects sent": travelling.objects / 1e6,
        "training peak": tensors(competitor.step).peak / 1e6,
        "saving peak": tensors(save).peak / 1e6,
        "full dict peak": tensors(lambda: kept.append(competitor.full())).peak / 1e6,
        "full dict": _bytes(kept) / 1e6,
    }


def ask(settings: Settings) -> Figures:
    """Returns three tables of times and one of bytes a case."""
    figures: Figures = {}
    for case in settings.cases_of([*SAVED], usual=["gpt", MANY]):
        usual, rounds = BESIDE.get(case, USUAL), settings.rounds or ROUNDS
        names = settings.implementations([*COMPETITORS] if settings.impl else usual)
        with tempfile.TemporaryDirectory() as folder:
            measured = run_ranks(measure, settings.ranks, case, names, rounds, folder)
        for operation, times in measured["times"].items():
            figures[f"{case}, {operation}"] = compare(times, BASELINES)
        figures[f"{case}, megabytes"] = measured["counts"]
    return figures


QUESTION = Question(
    "checkpoint",
    "Checkpoints",
    f"""\
Milliseconds to save and load a sharded checkpoint of model and AdamW state by torch.distributed.checkpoint
(into the page cache), and to assemble a full state dict of the model on the first rank; 2 ranks over gloo,
medians of {ROUNDS} rounds. Megabytes of the first rank: what collectives send while saving, for tensors and
for metadata, and the peaks of live tensors above those at rest.""",
    ask,
    chart="ms",
    cases=[*SAVED],
    implementations=[*COMPETITORS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
