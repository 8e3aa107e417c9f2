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
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass, pytree
from fsdp_wrap._writer_process.memory import StagedTensor, StagingMemory
from fsdp_wrap.checkpoint._storage import CheckedWriter, in_process, packed
from fsdp_wrap.checkpoint._team import Team

LEAST_BYTES, LEAST_TENSORS = 64 << 20, 1000
"""States of fewer bytes and tensors are written before a process has begun."""

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
        self._structure: Any = None
        self._copies: list[Any] = []
        self._parts: list[torch.Tensor] = []
        self._state: dict[str, Any] | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self.plan: KnownPlan | None = None
        atexit.register(self.end)

    @property
    def works(self) -> bool:
        """Whether it has not ended, and is not the one of a process that has forked this one."""
        return self._owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """Ends it, once it has answered."""
        if self.works:
            self._process.communicate()

    @torch.no_grad()
    def staged(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Returns a copy in the memory, in the place of the one before, whose save has ended.

        If that one was of the same structure, it gets the new values, and the plan of its save fits.
        """
        leaves, spec = pytree.tree_flatten(state)
        parts: list[torch.Tensor] = []
        structure = (spec, [_structure_of(leaf, parts) for leaf in leaves])
        if structure == self._structure and self._model() is model:
            torch._foreach_copy_(self._parts, parts)
            copies = [
                copied if isinstance(copied, torch.Tensor) else deepcopy(leaf)
                for copied, leaf in zip(self._copies, leaves)
            ]
        else:
            self._forget()
            self._memory.restart()
            copies = [
                self.copy(leaf) if isinstance(leaf, torch.Tensor) else deepcopy(leaf) for leaf in leaves
            ]
            self._structure, self._copies = structure, copies
            for copied in copies:
                _structure_of(copied, self._parts)
            self._model = weakref.ref(
                model, self._forget
            )  # pieces know process groups, which must go with it
        copied_state: dict[str, Any] = pytree.tree_unflatten(copies, spec)
        self._state = copied_state
        return copied_state

    def _forget(self, *_: Any) -> None:
        """Forgets the state that was copied last, and the plan of its save."""
        self._structure, self._copies, self._parts, self._state = None, [], [], None
        self.plan = None

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether a state is, unchanged, what `staged` has returned last."""
        return state is self._state

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


class KnownPlan(NamedTuple):
    """The ranks of a plan that the process keeps, and the paths of pickled items in the state."""

    ranks: list[int]
    pickled: dict[MetadataIndex, tuple[Any, ...]]


class ProcessWriter(CheckedWriter):
    """Lets the process write what its base would; results stay as the process has pickled them."""

    def __init__(self, process: WriterProcess, *given: Any) -> None:
        super().__init__(*given)
        self._process, self._given = process, given
        self._pickled: dict[MetadataIndex, tuple[Any, ...]] = {}

    def save(self, state: dict[str, Any], team: Team) -> None:
        super().save(state, team)
        if self._process.holds(state):
            self._process.plan = KnownPlan(team.ranks, self._pickled)

    def repeats(self, state: dict[str, Any], team: Team) -> bool:
        known = self._process.plan if self._process.holds(state) and self._process.works else None
        self._process.plan = None  # until this save has succeeded, on all ranks
        if known is None or known.ranks != team.ranks:
            return False
        self._pickled = known.pickled
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        contents: Contents = {
            item.index: self._process.place_of(planner.resolve_data(item)) for item in plan.items
        }
        paths = plan.planner_data
        self._pickled = {index: paths[index.fqn] for index, data in contents.items() if type(data) is bytes}
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._process.ask("write", self._given, plan, contents))
        return done

    def write_again(self, state: dict[str, Any]) -> Any:
        contents = {index: packed(reduce(getitem, path, state)) for index, path in self._pickled.items()}
        return self._process.ask("write", self._given, None, contents)

    def finish(self, metadata: Metadata | None, results: list[Any]) -> None:
        self._process.ask("finish", self._given, metadata, results)

    def finish_again(self, results: list[Any]) -> None:
        self.finish(None, results)


_PLAIN = (torch.Tensor, nn.Parameter)


def _structure_of(leaf: Any, parts: list[torch.Tensor]) -> Any:
    """Returns what DCP's plan for a value depends on, and adds the tensors that have the values of a tensor.

    Equals nothing else, not even that of the same value, if this is not known.
    """
    if type(leaf) in _PLAIN and leaf.layout is torch.strided:
        parts.append(leaf)
        return leaf.dtype, leaf.shape, leaf.stride()
    if not isinstance(leaf, torch.Tensor):
        return object() if hasattr(leaf, "__create_write_items__") else None
    if not is_traceable_wrapper_subclass(leaf):
        return object()
    names, context = leaf.__tensor_flatten__()
    inner = [getattr(leaf, name) for name in names]  # of a `DTensor` its mesh, too
    others = [_structure_of(each, parts) if isinstance(each, torch.Tensor) else each for each in inner]
    return type(leaf), leaf.shape, context, others


def _local_nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that this rank holds of a tensor, which may be sharded."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(_local_nbytes(each) for each in inner if isinstance(each, torch.Tensor))


_running: list[WriterProcess] = []


@in_process.fill
def in_the_process(state: dict[str, Any], model: nn.Module) -> Any:
    """Returns a copy and what writes it, if there is a process, or one pays for a state of this size."""
    if not _running or not _running[0].works:
        tensors = [each for each in pytree.tree_leaves(state) if isinstance(each, torch.Tensor)]
        is_small = len(tensors) < LEAST_TENSORS and sum(map(_local_nbytes, tensors)) < LEAST_BYTES
        if is_small or not sys.executable or sys.platform != "linux":
            return None
        _running[:] = [WriterProcess()]
    return _running[0].staged(state, model), partial(ProcessWriter, _running[0])
