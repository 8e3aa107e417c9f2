"""The loop of the process: it answers requests until the rank closes the pipe, or ends."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fsdp_wrap._writer_process.memory import StagedTensor
from fsdp_wrap.checkpoint._storage import CheckedWriter

if TYPE_CHECKING:
    from fsdp_wrap._writer_process.process import Contents

_LOOK_SECONDS = 0.2
_NICENESS = 19


def work(file: int, rank: int) -> None:
    """Answers requests from standard input on standard output.

    `file` is the descriptor of the memory, `rank` the process id of the rank, which may have died by now.
    """
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    Thread(target=_end_with, args=(rank,), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not be taken for answers
    own = _Answers(file)
    kinds: dict[str, Callable[..., Any]] = {"write": own.write, "finish": own.finish}
    while True:
        try:
            what, *request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = kinds[what](*request)
        except Exception as error:
            answer = _portable(error)
        pickle.dump(answer, answers)
        answers.flush()


class _Answers:
    """The kinds of requests; what a later one brings None for is as it was."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._plan: SavePlan
        self._contents: Contents = {}
        self._metadata: Metadata

    def write(self, given: tuple[Any, ...], plan: SavePlan | None, contents: Contents) -> bytes:
        """Writes a rank's items; returns the results, pickled."""
        if plan is not None:
            self._plan, self._contents = plan, {}
        self._contents.update(contents)
        planner = _FromMemory(self._contents, mmap.mmap(self._file, os.fstat(self._file).st_size))
        return pickle.dumps(CheckedWriter(*given).write_data(self._plan, planner).value())

    def finish(self, given: tuple[Any, ...], metadata: Metadata | None, results: list[Any]) -> None:
        """Writes the metadata and the manifest."""
        if metadata is not None:
            self._metadata = metadata
        CheckedWriter(*given).finish(self._metadata, results)


class _FromMemory(DefaultSavePlanner):
    """Finds the data of items in the memory."""

    def __init__(self, contents: Contents, memory: mmap.mmap) -> None:
        super().__init__()
        self._contents, self._memory = contents, memory

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the data of an item."""
        content = self._contents[write_item.index]
        if isinstance(content, StagedTensor):
            return content.tensor_in(self._memory)
        return io.BytesIO(content) if isinstance(content, bytes) else content


def _portable(error: Exception) -> Exception:
    """Returns an error that the rank can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(rank: int) -> None:
    """Ends this process when the rank has died: others may remove what it writes.

    The end of the pipe does not tell: forks of the rank hold it, too.
    """
    while os.getppid() == rank:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
