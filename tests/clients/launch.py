"""Rank processes for clients: as torchrun starts them, and kept over the tests of one client."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bed.crew import Crew
from bed.pool import make_job
from bed.ports import free_port
from bed.report import RankFailure
from fsdp_wrap import compat

WORLD_SIZE = 2
TIMEOUT = 120.0
GRACE = 5.0


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of a client's tests; of the packages the first is the client, others are used with it."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"needs the extra 'clients': {', '.join(absent)} not installed"
    return [pytest.mark.slow, pytest.mark.client(*packages), pytest.mark.skipif(bool(absent), reason=reason)]


class Ranks:
    """Processes, two by default, that import a client once; they are started anew where one does not pass."""

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self._crew, self._world_size = Crew(), world_size

    def __call__(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `body(rank, world_size, port, *args)` on all ranks; returns their results."""
        job = make_job(body, (free_port(), *args), {}, self._world_size, TIMEOUT, None)
        outcomes = self._crew.run(job, GRACE)
        if {outcome.kind for outcome in outcomes} != {"passed"}:
            pytest.fail(str(RankFailure(outcomes)), pytrace=False)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        self._crew.close()


@contextlib.contextmanager
def client_rank(
    rank: int, port: int, wrapped: bool, fully_shard: bool = False, world_size: int = WORLD_SIZE
) -> Iterator[None]:
    """Stands for torchrun, and `fsdp_wrap.compat` if the client shall use our wrapper and `fully_shard`."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    with compat.install(True, fully_shard) if wrapped else contextlib.nullcontext():
        try:
            yield
        finally:
            _forget_accelerate()


def require_units(model: Any, package: str) -> None:
    """Asserts that every layer is a unit of the package."""
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(units) > model.config.num_hidden_layers
    assert {type(unit).__mro__[1].__module__.partition(".")[0] for unit in units} == {package}


def open_to_cpu(stack: contextlib.ExitStack) -> None:
    """Lets accelerate give torch's own FSDP to a host without accelerators."""
    from accelerate import state

    from fsdp_wrap.compat.clients import _open_accelerate

    _open_accelerate(stack.enter_context(compat.Installation()), state)


def _forget_accelerate() -> None:
    """Clears the state that accelerate shares in a process, so that the next test starts afresh."""
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
