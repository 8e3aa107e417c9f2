"""`InnerTensors`: the all-gather of frozen subclasses of inner tensors, without methods of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass
from fsdp_wrap._params.parallel import dtensor_of, to_local


class InnerTensors:
    """The inner tensors of a subclass, which is cut by rows and put together again.

    Inner tensors with a row for each of the subclass's are sharded by rows. Others, equal in a part and in
    the whole (one scale for all, say), are replicated. The subclass must implement `narrow`, to cut a part.

    Args:
        whole: The parameter's tensor.
        by_rows: Names of the tensors that are sharded.
        others: Names of the tensors that are replicated.
    """

    def __init__(self, whole: torch.Tensor, by_rows: Sequence[str], others: Sequence[str]) -> None:
        self._kind: Any = type(whole)
        self._context = _flattened(whole)[1]
        self._by_rows, self._others = by_rows, others

    @classmethod
    def cut(cls, fqn: str, whole: torch.Tensor, rows: tuple[int, int]) -> tuple[InnerTensors, torch.Tensor]:
        """Cuts a parameter; returns a description, and a copy of this rank's rows: (first, number)."""
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
        """Returns the tensors of a part to be gathered, and the part as metadata for `put_together`."""
        return tuple(getattr(part, name) for name in self._by_rows), part

    def put_together(
        self,
        outputs: Sequence[torch.Tensor],
        part: torch.Tensor,
        size: tuple[torch.Size, tuple[int, ...]],
        out: torch.Tensor | None = None,
    ) -> Any:
        """Makes the whole from gathered tensors; see `fsdp_post_all_gather`.

        Args:
            outputs: The gathered tensors.
            part: This rank's part, which has the replicated ones.
            size: Shape and stride of the whole.
            out: The whole that was made in the same memory before, if any.
        """
        if out is not None:
            for name in self._others:
                getattr(out, name).data.copy_(getattr(part, name))  # not seen by autograd as an edit
            return None
        inner = {name: getattr(part, name).clone() for name in self._others}
        inner |= zip(self._by_rows, outputs)
        return self._kind.__tensor_unflatten__(inner, self._context, *size), outputs


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a subclass over copies of another one's inner tensors."""
    names, context = _flattened(tensor)
    inner = {name: getattr(tensor, name).detach().clone() for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def like_made_of_tensors(value: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a `DTensor` whose local part has inner tensors; None for other tensors."""
    if not isinstance(value, DTensor) or not is_traceable_wrapper_subclass(to_local(value)):
        return None
    return dtensor_of(copied(to_local(value.detach())), value._spec)


def _flattened(tensor: torch.Tensor) -> tuple[list[str], Any]:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [*names], context


def _goes_by_rows(fqn: str, whole: torch.Tensor, part: torch.Tensor, name: str, rows: int) -> bool:
    """Whether an inner tensor has a row for each row of the whole, judged by this rank's part."""
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
