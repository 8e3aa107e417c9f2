"""Parameters that the files lack, with the values that their model's class gives to new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import replace_tensor
from fsdp_wrap._state import ReadsOnAccess
from fsdp_wrap.checkpoint._hub.converted import Kept

_UNSET = float("nan")


class Initialised(ReadsOnAccess):
    """A parameter that is initialised when it is read, with all others of its module.

    Args:
        name: Its name in the module.
        owner: The module, on the meta device.
        initialise: Initialises what is not on the meta device there.
        seed: By which random values are drawn.
        kept: What was initialised last.
    """

    def __init__(
        self, name: str, owner: nn.Module, initialise: Callable[[], object], seed: int, kept: Kept
    ) -> None:
        self._name, self._owner, self._initialise = name, owner, initialise
        self._seed, self._kept = seed, kept
        param: Any = owner._parameters[name]
        self.shape, self.dtype = param.shape, param.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""
        return self._kept.get(self._owner, self._made)[self._name].view(-1)[start:stop]

    @property
    def is_set(self) -> bool:
        """Whether the model's class initialises the parameter."""
        return not self.read(0, self.shape.numel()).isnan().any()

    def _made(self) -> dict[str, torch.Tensor]:
        """Returns newly initialised parameters of the module, in host memory; it has its own afterwards."""
        before = dict(self._owner.named_parameters(recurse=False))
        made = {
            name: nn.Parameter(torch.full_like(param, _UNSET, device="cpu"), False)
            for name, param in before.items()
        }
        try:
            for name, param in made.items():
                replace_tensor(self._owner, name, param)
            with torch.no_grad(), _drawn_by(self._seed):
                self._initialise()
        finally:
            for name, param in before.items():
                replace_tensor(self._owner, name, param)
        return {name: param.detach() for name, param in made.items()}


@contextmanager
def _drawn_by(seed: int) -> Iterator[None]:
    """Seeds the host's random numbers inside, and restores their state afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
