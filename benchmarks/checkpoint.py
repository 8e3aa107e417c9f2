"""What checkpoints cost: time, traffic and memory, with the competitors taking turns in one run.

    python -m benchmarks.checkpoint --impl fsdp1,fsdp2,fsdp_wrap,fsdp_wrap_flat --cases gpt,small

A checkpoint is the model and its AdamW state after two steps. Measured are `save` and `load` of a sharded
one through `torch.distributed.checkpoint` in a temporary folder on disk, and `full`: the model's full state
dict on the first rank, in host memory where the implementation can do that.

Bytes that travel are counted below the libraries, those of object collectives (metadata) apart. Memory is
what the allocator hands out, at its peak, beyond what the rank holds at rest.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
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

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fsdp_wrap
from benchmarks.harness import (
    Summary,
    interleave,
    machine,
    peak_bytes,
    run_ranks,
    summarize,
    table,
    write_json,
)
from benchmarks.step import CASES, IMPLEMENTATIONS, Case, _count, _names

WARMUP = 1


# --- what is compared ---------------------------------------------------------------------------------


class Checkpoints:
    """A model and its optimizer; saved, loaded and assembled by torch's functions for state dicts."""

    def __init__(self, implementation: str, case: Case) -> None:
        torch.manual_seed(0)
        self._model = IMPLEMENTATIONS[implementation](case.model())
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = case.batch()

    def step(self) -> None:
        """One step of training."""
        self._optimizer.zero_grad()
        self._model(self._batch).backward()
        self._optimizer.step()

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
        return torch_state_dict.get_model_state_dict(self._model, options=options)

    def held(self) -> int:
        """Bytes of this rank's parameters, gradients and optimizer state."""
        params = list(self._model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        state = [v for entry in self._optimizer.state.values() for v in entry.values()]
        local = [getattr(each, "_local_tensor", each) for each in (*params, *grads, *state)]
        storages = (each.untyped_storage() for each in local)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _sharded(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _state(self) -> dict[str, Any]:
        model, optim = torch_state_dict.get_state_dict(self._model, self._optimizer)
        return {"model": model, "optim": optim}

    def _take(self, state: dict[str, Any]) -> None:
        torch_state_dict.set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
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
        return self._wrapper.state_dict_type(self._model, kind, None, optim_config)

    def _state(self) -> dict[str, Any]:
        optim = self._wrapper.optim_state_dict(self._model, self._optimizer)
        return {"model": self._model.state_dict(), "optim": optim}

    def _take(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        cut = self._wrapper.optim_state_dict_to_load(self._model, self._optimizer, state["optim"])
        self._optimizer.load_state_dict(cut)

    def full(self) -> dict[str, Any]:
        config = self._api.FullStateDictConfig(offload_to_cpu=self._offloads, rank0_only=True)
        with self._wrapper.state_dict_type(self._model, self._api.StateDictType.FULL_STATE_DICT, config):
            return self._model.state_dict()


# On a host without accelerators torch's wrapper crashes where it offloads: it keeps values where they are.
COMPETITORS: dict[str, Callable[[Case], Checkpoints]] = {
    "fsdp1": partial(WrapperCheckpoints, torch_fsdp, False, "fsdp1"),
    "fsdp1_flat": partial(WrapperCheckpoints, torch_fsdp, False, "fsdp1_flat"),
    "fsdp2": partial(Checkpoints, "fsdp2"),
    "fsdp_wrap": partial(WrapperCheckpoints, fsdp_wrap, True, "fsdp_wrap"),
    "fsdp_wrap_flat": partial(WrapperCheckpoints, fsdp_wrap, True, "fsdp_wrap_flat"),
}


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
    tensors = (leaf for leaf in tree_iter(argument) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _for_objects() -> bool:
    """Whether one of torch's object collectives is what issues the present one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "_object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def measure(case_name: str, names: list[str], rounds: int, folder: str, sync: bool) -> dict[str, Any]:
    """Called on every rank: seconds by operation and competitor, and the first rank's bytes by competitor."""
    case = CASES[case_name]
    competitors = {name: COMPETITORS[name](case) for name in names}
    for competitor in competitors.values():
        competitor.step(), competitor.step()
    folders = {name: Path(folder, case_name, name) for name in names}
    options: dict[str, Any] = {"sync_files": sync, "thread_count": 1}

    def save(name: str) -> None:
        competitors[name].save(dcp.FileSystemWriter(folders[name], **options))

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


def _counts(competitor: Checkpoints, save: Callable[[], None]) -> dict[str, int]:
    with Travelling() as travelling:
        save()
    rest = competitor.held()
    training = peak_bytes(competitor.step)
    parts = [value for value in competitor.full().values() if isinstance(value, torch.Tensor)]
    result = sum(value.nbytes for value in parts if value.device.type == "cpu")
    del parts
    return {
        "tensor_bytes": travelling.tensors,
        "object_bytes": travelling.objects,
        "rest": rest,
        "training": training,
        "save": peak_bytes(save),
        "full": peak_bytes(competitor.full),
        "full_result": result,
    }


# --- reporting ----------------------------------------------------------------------------------------


def _report(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The counts in kilobytes, and the peak of saving by that of training."""
    width = max(map(len, counts))
    heads = ("tensors", "objects", "at rest", "training", "saving", "peak ratio", "full", "its result")
    lines = ["  " + " " * width + "".join(f"{head:>12}" for head in heads)]
    for name, row in counts.items():
        ratio = (row["rest"] + row["save"]) / (row["rest"] + row["training"])
        cells = [row[key] / 1e3 for key in ("tensor_bytes", "object_bytes", "rest", "training", "save")]
        cells += [ratio, row["full"] / 1e3, row["full_result"] / 1e3]
        lines.append(f"  {name:{width}}" + "".join(f"{cell:12.2f}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    options = _parse()
    baseline = options.impl[0]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{options.ranks} ranks over gloo, 1 thread each\n", flush=True)
    results: dict[str, dict[str, Summary]] = {}
    bytes_by_case: dict[str, Any] = {}
    for case in options.cases:
        rounds = options.rounds or {"gpt": 7}.get(case, 15)
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            found = run_ranks(measure, options.ranks, case, options.impl, rounds, folder, options.sync_files)
        finally:
            shutil.rmtree(folder)
        for operation, times in found["times"].items():
            results[f"{case}: {operation}"] = summarize(times, baseline)
            print(table(f"{case}: {operation}", results[f"{case}: {operation}"], baseline) + "\n", flush=True)
        bytes_by_case[case] = found["counts"]
        print(f"{case}: kilobytes on the first rank\n{_report(found['counts'])}\n", flush=True)
    if options.json:
        settings = {"ranks": options.ranks, "sync_files": options.sync_files, "bytes": bytes_by_case}
        write_json(options.json, settings, results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time, traffic and memory of checkpoints.")
    parser.add_argument(
        "--impl",
        type=partial(_names, COMPETITORS),
        default="fsdp1,fsdp2,fsdp_wrap,fsdp_wrap_flat",
        metavar="A,B",
    )
    parser.add_argument("--cases", type=partial(_names, CASES), default="gpt,small", metavar="A,B")
    parser.add_argument("--ranks", type=_count, default=2, metavar="N")
    parser.add_argument("--rounds", type=_count, metavar="N", help="of each operation")
    parser.add_argument("--folder", type=Path, help="where to write; by default, where temporary files go")
    parser.add_argument("--sync-files", action="store_true", help="wait until files are on the disk")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
