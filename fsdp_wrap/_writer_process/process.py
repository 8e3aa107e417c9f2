"""`WriterProcess`: a process beside a rank that writes files, and takes only the time that nobody else needs.

A thread would hold the interpreter's lock for every small tensor, and compete for processors with training.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass, pytree
from fsdp_wrap._writer_process.memory import StagedTensor, StagingMemory
from fsdp_wrap.checkpoint._storage import CheckedWriter, in_process

LEAST_BYTES = 64 << 20
"""States of fewer bytes are written before a process has begun."""

Contents = dict[MetadataIndex, StagedTensor | torch.Tensor | bytes]
"""Data of items: a place in the memory, or the thing itself."""

_START = "import sys; sys.path[:] = {path!r}; from fsdp_wrap._writer_process.work import work; work({file})"


class WriterProcess:
    """A process that writes this rank's files; it ends with the rank."""

    def __init__(self) -> None:
        self._memory = StagingMemory()
        start = _START.format(path=sys.path, file=self._memory.descriptor)
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.descriptor],
            start_new_session=True,  # Ctrl-C is for the ranks
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._owner = os.getpid()
        atexit.register(self.end)

    @property
    def works(self) -> bool:
        """Whether it has not ended, and is not the one of a process that has forked this one."""
        return self._owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """Ends it, once it has answered."""
        if self.works:
            self._process.communicate()

    def restart(self) -> None:
        """Lets the next state take the place of the one before, whose save has ended."""
        self._memory.restart()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy that the process finds; of a tensor subclass one over copies of its parts."""
        if not is_traceable_wrapper_subclass(tensor):
            return self._memory.copy_of(tensor.detach())
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # of a `DTensor` its mesh, too
        for name, part in inner.items():
            inner[name] = self.copy(part) if isinstance(part, torch.Tensor) else part
        kind: Any = type(tensor)
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return made

    def place_of(self, data: torch.Tensor | io.BytesIO) -> StagedTensor | torch.Tensor | bytes:
        """Returns how the process finds an item's data."""
        if isinstance(data, torch.Tensor):
            return self._memory.place_of(data) or data
        return data.getvalue()

    def ask(self, *request: Any) -> Any:
        """Returns the answer to a request; raises its error, or a RuntimeError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(
                "the process that writes this rank's checkpoint files was ended from outside (exit code "
                f"{self._process.wait()}): look whether the host had enough memory"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


class ProcessWriter(CheckedWriter):
    """Lets the process write what its base would."""

    def __init__(self, process: WriterProcess, *given: Any) -> None:
        super().__init__(*given)
        self._process, self._given = process, given

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        contents: Contents = {
            item.index: self._process.place_of(planner.resolve_data(item)) for item in plan.items
        }
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._process.ask(self._given, plan, contents))
        return done


def _local_nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that this rank holds of a tensor, which may be sharded."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(_local_nbytes(each) for each in inner if isinstance(each, torch.Tensor))


_running: list[WriterProcess] = []


@in_process.fill
def in_the_process(state: Any) -> Any:
    """Returns what copies tensors and what writes them, if a process pays for a state of this size."""
    nbytes = sum(_local_nbytes(each) for each in pytree.tree_leaves(state) if isinstance(each, torch.Tensor))
    if nbytes < LEAST_BYTES or not sys.executable or sys.platform != "linux":
        return None
    if not _running or not _running[0].works:
        _running[:] = [WriterProcess()]
    _running[0].restart()
    return _running[0].copy, partial(ProcessWriter, _running[0])
