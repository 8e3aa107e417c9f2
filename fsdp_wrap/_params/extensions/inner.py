"""`InnerTensors`: what is gathered of a frozen subclass that is made of other tensors, and says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass
from fsdp_wrap._params.parallel import dtensor_of, to_local


class InnerTensors:
    """The tensors of which a subclass is made, as its rows are cut and put together again.

    Those that have a row for each of the subclass's go by rows. Others, which are the same for a part as for
    the whole (one scale for all, say), every rank has. The subclass must implement `narrow`, which tells what
    a part of it is.

    Args:
        whole: The parameter's tensor.
        by_rows: Names of those that go by rows.
        others: Names of those that do not.
    """

    def __init__(self, whole: torch.Tensor, by_rows: Sequence[str], others: Sequence[str]) -> None:
        self._kind: Any = type(whole)
        self._context = _flattened(whole)[1]
        self._by_rows, self._others = by_rows, others

    @classmethod
    def cut(cls, fqn: str, whole: torch.Tensor, rows: tuple[int, int]) -> tuple[InnerTensors, torch.Tensor]:
        """Cuts a parameter.

        Args:
            fqn: Name of the parameter within its unit.
            whole: Its tensor.
            rows: The (first, number) of the rows of this rank.

        Returns:
            How it was cut, and this rank's rows in memory of their own.

        Raises:
            TypeError: If the subclass has no `narrow`, or inner tensors that go by other steps than rows.
        """
        names = _flattened(whole)[0]
        try:
            part = whole.narrow(0, *rows)
        except (NotImplementedError, RuntimeError, ValueError, AssertionError, TypeError) as error:
            raise _refused(fqn, whole, f"has no narrow() for {rows[1]} rows from {rows[0]} on") from error
        if type(part) is not type(whole) or _flattened(part)[0] != names:
            raise _refused(fqn, whole, f"is made a {type(part).__name__} by narrow()")
        by_rows = [name for name in names if _goes_by_rows(fqn, whole, part, name, rows[1])]
        return cls(whole, by_rows, [name for name in names if name not in by_rows]), copied(part)

    def inputs(self, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Returns what is gathered of a part, and what is to be told when it has come."""
        return tuple(getattr(part, name) for name in self._by_rows), part

    def put_together(
        self,
        outputs: Sequence[torch.Tensor],
        part: torch.Tensor,
        size: tuple[torch.Size, tuple[int, ...]],
        out: torch.Tensor | None = None,
    ) -> Any:
        """Makes the whole of what has come from all ranks; see `fsdp_post_all_gather`.

        Args:
            outputs: What goes by rows.
            part: Of this rank, which has the rest.
            size: Shape and stride of the whole.
            out: The whole that was made of the same memory before, if it was.
        """
        if out is not None:
            for name in self._others:
                getattr(out, name).data.copy_(getattr(part, name))  # no edit, as autograd sees it
            return None
        inner = {name: getattr(part, name).clone() for name in self._others}
        inner |= zip(self._by_rows, outputs)
        return self._kind.__tensor_unflatten__(inner, self._context, *size), outputs


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a subclass that is made of copies of the tensors of which another one is made."""
    names, context = _flattened(tensor)
    inner = {name: getattr(tensor, name).detach().clone() for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def like_made_of_tensors(value: torch.Tensor) -> torch.Tensor | None:
    """Returns memory like that of a `DTensor` whose part is made of other tensors; None for any other."""
    if not isinstance(value, DTensor) or not is_traceable_wrapper_subclass(to_local(value)):
        return None
    return dtensor_of(copied(to_local(value.detach())), value._spec)


def _flattened(tensor: torch.Tensor) -> tuple[list[str], Any]:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [*names], context


def _goes_by_rows(fqn: str, whole: torch.Tensor, part: torch.Tensor, name: str, rows: int) -> bool:
    """Whether an inner tensor has a row for each of the whole, as this rank's part shows."""
    full, own = getattr(whole, name).shape, getattr(part, name).shape
    if full and full[0] == whole.shape[0] and own == (rows, *full[1:]):
        return True
    if own == full:
        return False
    raise _refused(fqn, whole, f"has '{name}' of shape {tuple(full)}, and {tuple(own)} in {rows} rows")


def _refused(fqn: str, whole: torch.Tensor, why: str) -> TypeError:
    return TypeError(
        f"parameter '{fqn}' of shape {tuple(whole.shape)} is a {type(whole).__name__} that {why}, so that it "
        "cannot be cut by rows: quantise by rows, give its class fsdp_pre_all_gather and "
        "fsdp_post_all_gather, wrap it by FullyShardedDataParallel, or ignore it with ignored_params"
    )
