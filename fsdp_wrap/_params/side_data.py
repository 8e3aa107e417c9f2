"""`SideData`: what frozen parameters of some classes keep beside their tensors, such as scales of codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import Seam
from fsdp_wrap._core.torch_private import make_subclass

_PLAIN = (nn.Parameter, torch.Tensor)


class SideData(ABC):
    """What one frozen parameter keeps beside its tensor.

    The tensor is sharded and gathered like any other, but never cast: it holds codes. All else stays the
    same while the parameter is frozen, so each rank has it whole, and each tensor that stands for the
    parameter refers to the same: the sharded one, the full one of the class, and those of state dicts.

    Args:
        fqn: Name of the parameter in its unit.
        param: The parameter.

    Attributes:
        kind: Its class.
        dtype: The dtype of its codes.
        attributes: What all tensors that stand for it carry.
    """

    def __init__(self, fqn: str, param: nn.Parameter) -> None:
        self.fqn, self.kind, self.dtype = fqn, type(param), param.dtype
        self.attributes = self.attributes_of(param)

    @staticmethod
    @abstractmethod
    def check(fqn: str, param: nn.Parameter, filled_later: bool) -> None:
        """Raises TypeError or ValueError for a parameter that cannot be sharded.

        Args:
            fqn: Its name.
            param: The parameter.
            filled_later: Whether an initialising function still gives values to what is on the meta device.
        """

    @staticmethod
    @abstractmethod
    def attributes_of(param: nn.Parameter) -> dict[str, Any]:
        """Returns the attributes that tensors which stand for a parameter carry."""

    @abstractmethod
    def describe(self) -> str:
        """Describes how the parameter is stored; codes of another description mean other values."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors beside, by name."""

    @abstractmethod
    def saved(self) -> dict[str, torch.Tensor]:
        """Returns what state dicts have beside the codes, by what follows the parameter's name and a dot."""

    @abstractmethod
    def misfit(self, saved: Mapping[str, Any]) -> str | None:
        """Returns why codes that were saved with these entries would mean other values here; None if not."""

    @abstractmethod
    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over entries that fit."""

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Moves the tensors beside to a device."""

    @abstractmethod
    def prepare(self, module: nn.Module) -> None:
        """Prepares a module that computes with the parameter, whose tensors come and go from now on."""

    @abstractmethod
    def plain(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the numbers that the full codes mean; on the meta device only their shape."""

    def parameter(self, value: torch.Tensor) -> nn.Parameter:
        """Returns a parameter of the codes: of its class, or a `DTensor` of them."""
        is_plain = type(value) in _PLAIN
        made: nn.Parameter = (
            make_subclass(self.kind, value.detach(), False) if is_plain else nn.Parameter(value, False)
        )
        self.put_on(made)
        return made

    def put_on(self, tensor: torch.Tensor) -> None:
        """Lets a tensor stand for the parameter."""
        tensor.__dict__.update(self.attributes)


_SEAMS: dict[str, Seam[Mapping[type, Any]]] = {
    "bitsandbytes": Seam("weights of bitsandbytes", "fsdp_wrap.compat._bitsandbytes")
}
"""By a package that has such classes, the `SideData` of each."""


def side_data_kind(param: torch.Tensor) -> type[SideData] | None:
    """Returns what describes the side data of a parameter's class; None for other classes."""
    kind = type(param)
    seam = None if kind in _PLAIN else _SEAMS.get(kind.__module__.partition(".")[0])
    return None if seam is None or seam.filled is None else seam.filled.get(kind)


def side_data_of(fqn: str, param: torch.Tensor) -> SideData | None:
    """Returns a parameter's side data; None for one of another class."""
    kind = side_data_kind(param)
    return None if kind is None or not isinstance(param, nn.Parameter) else kind(fqn, param)


def holds_codes(side_data: Iterable[SideData | None]) -> bool:
    """Whether parameters hold codes, whose numbers mean others; all of a segment do, or none."""
    return any(side is not None for side in side_data)


def refuse_training(
    side_data: Iterable[SideData | None], wanted: Iterable[bool], name_of: Callable[[str], str]
) -> None:
    """Refuses gradients of codes.

    Args:
        side_data: Of each parameter of a segment.
        wanted: Which of them train.
        name_of: Returns a parameter's name relative to the root.
    """
    for side, trains in zip(side_data, wanted):
        if side is not None and trains:
            raise ValueError(
                f"parameter '{name_of(side.fqn)}' was made to require gradients (on rank {dist.get_rank()}), "
                f"and holds the codes of {side.describe()}, which have none: freeze it "
                "(requires_grad_(False)) and train adapters beside it"
            )


def refuse_other_codes(
    side_data: Iterable[SideData | None], dtype: torch.dtype, name_of: Callable[[str], str]
) -> None:
    """Refuses another dtype of a shard that holds codes, since a cast changes what they mean."""
    for side in side_data:
        if side is not None and dtype != side.dtype:
            raise ValueError(
                f"parameter '{name_of(side.fqn)}' cannot go from {side.dtype} to {dtype} (on rank "
                f"{dist.get_rank()}): it holds the codes of {side.describe()}. Convert the other parameters "
                "alone, or before sharding"
            )


def tensors_beside(fqn: str, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a parameter's side data by name."""
    side = side_data_of(fqn, param)
    for name, tensor in {} if side is None else side.tensors().items():
        yield f"{fqn}.{name}", tensor


seams_of_side_data: Mapping[str, Seam[Mapping[type, Any]]] = _SEAMS
