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
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_wrap._core.torch_private import foreach_copy_, is_traceable_wrapper_subclass, pytree
from fsdp_wrap._writer_process.memory import StagedTensor, StagingMemory
from fsdp_wrap.checkpoint._storage import CheckedWriter, in_process, packed
from fsdp_wrap.checkpoint._team import Team

LEAST_BYTES, LEAST_TENSORS = 64 << 20, 1000
"""States of fewer bytes and tensors are written before a process has begun."""

Contents = dict[MetadataIndex, StagedTensor | torch.Tensor | bytes]
"""Data of items: a place in the memory, or the thing itself."""

Paths = dict[MetadataIndex, tuple[Any, ...]]
"""The places of pickled items in a state."""


@dataclass(eq=False)
class _Staged:
    """The copy of a state in the memory; its plan, which the process keeps, has ranks and pickled items."""

    model: Callable[[], nn.Module | None]
    structure: Any
    parts: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Tensor | None] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    plan: tuple[list[int], Paths] | None = None


_START = """
import os, sys
os.setpgrp()  # Ctrl-C is for the ranks; a session of its own would be no less nice than theirs
sys.path[:] = {path!r}
from fsdp_wrap._writer_process.work import work
work({file}, {rank})
"""


class WriterProcess:
    """A process that writes this rank's files; it ends with the rank."""

    def __init__(self) -> None:
        self._memory = StagingMemory()
        start = _START.format(path=sys.path, file=self._memory.descriptor, rank=os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.descriptor],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._owner = os.getpid()
        self._last: _Staged | None = None
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
        structure = spec, [_structure_of(leaf, parts) for leaf in leaves]
        last = self._last
        if last is not None and last.model() is model and last.structure == structure:
            foreach_copy_(last.parts, parts)
        else:
            self._memory.restart()
            # Pieces know process groups, which must go with the model.
            self._last = last = _Staged(weakref.ref(model, self._forget), structure)
            last.copies = [self._copy(leaf, last.parts) if _is_tensor(leaf) else None for leaf in leaves]
        values = [deepcopy(leaf) if copied is None else copied for copied, leaf in zip(last.copies, leaves)]
        last.state = pytree.tree_unflatten(values, spec)
        return last.state

    def keep_plan(self, state: dict[str, Any], ranks: list[int], pickled: Paths) -> None:
        """Keeps the plan that the process has written a state by, if that is still the copied one."""
        if self._last is not None and self._last.state is state:
            self._last.plan = ranks, pickled

    def take_plan(self, state: dict[str, Any], ranks: list[int]) -> Paths | None:
        """Returns the pickled items of the kept plan if it fits; it is not kept for a save after this one."""
        if self._last is None:
            return None
        plan, self._last.plan = self._last.plan, None
        if plan is None or plan[0] != ranks or self._last.state is not state or not self.works:
            return None
        return plan[1]

    def _forget(self, _: Any) -> None:
        self._last = None

    def _copy(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """Returns a copy that the process finds; of a tensor subclass one over copies of its parts."""
        if not is_traceable_wrapper_subclass(tensor):
            parts.append(self._memory.copy_of(tensor.detach()))
            return parts[-1]
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # of a `DTensor` its mesh, too
        for name, part in inner.items():
            inner[name] = self._copy(part, parts) if _is_tensor(part) else part
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
    """Lets the process write what its base would; results stay as the process has pickled them."""

    def __init__(self, process: WriterProcess, *given: Any) -> None:
        super().__init__(*given)
        self._process, self._given = process, given
        self._pickled: Paths = {}

    def save(self, state: dict[str, Any], team: Team) -> None:
        super().save(state, team)
        self._process.keep_plan(state, team.ranks, self._pickled)  # it has succeeded on all ranks

    def known(self, state: dict[str, Any], team: Team) -> Any:
        pickled = self._process.take_plan(state, team.ranks)
        if pickled is None:
            return None
        self._pickled = pickled
        return partial(self._write_again, state), partial(self.finish, None)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        contents: Contents = {
            item.index: self._process.place_of(planner.resolve_data(item)) for item in plan.items
        }
        paths = plan.planner_data
        self._pickled = {index: paths[index.fqn] for index, data in contents.items() if type(data) is bytes}
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._process.ask("write", self._given, plan, contents))
        return done

    def _write_again(self, state: dict[str, Any]) -> Any:
        contents = {index: packed(reduce(getitem, path, state)) for index, path in self._pickled.items()}
        return self._process.ask("write", self._given, None, contents)

    def finish(self, metadata: Metadata | None, results: list[Any]) -> None:
        self._process.ask("finish", self._given, metadata, results)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _structure_of(leaf: Any, parts: list[torch.Tensor]) -> Any:
    """Returns what DCP's plan for a value depends on, and adds the tensors that have the values of a tensor.

    Equals nothing else, not even that of the same value, if this is not known.
    """
    if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided:
        parts.append(leaf)
        return leaf.dtype, leaf.shape, leaf.stride()
    if not is_traceable_wrapper_subclass(leaf):
        known = not _is_tensor(leaf) and not hasattr(leaf, "__create_write_items__")
        return None if known else object()
    names, context = leaf.__tensor_flatten__()
    inner = [getattr(leaf, name) for name in names]
    return (
        type(leaf),
        leaf.shape,
        context,
        [_structure_of(value, parts) if _is_tensor(value) else value for value in inner],
    )


_running: list[WriterProcess] = []


@in_process.fill
def in_the_process(state: dict[str, Any], model: nn.Module) -> Any:
    """Returns a copy and what writes it, if there is a process, or one pays for a state of this size."""
    if not _running or not _running[0].works:
        parts: list[torch.Tensor] = []  # of which this rank holds all
        for leaf in pytree.tree_leaves(state):
            _structure_of(leaf, parts)
        is_small = len(parts) < LEAST_TENSORS and sum(part.nbytes for part in parts) < LEAST_BYTES
        if is_small or not sys.executable or sys.platform != "linux":
            return None
        _running[:] = [WriterProcess()]
    return _running[0].staged(state, model), partial(ProcessWriter, _running[0])
