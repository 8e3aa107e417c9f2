"""`PartialSums`: gradients that are sums over the ranks of a parameter's own mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params.parallel.local_part import LocalPart, arrived

_Summand = tuple[LocalPart, tuple[int, ...], Sequence[torch.Tensor]]
"""(part of the parameter, mesh dimensions to sum over, tensors of this rank)"""


class PartialSums:
    """Sums the gradients of one segment's leaves over the meshes of the distributed parameters.

    Each rank has a summand where ranks compute with different tokens (norms under sequence parallelism). One
    collective sums all gradients of a segment. Accumulated gradients wait for the last one.

    Args:
        parts: The local part of each parameter; None for one that is not distributed.
        dtype: Dtype of the sums, unless the gradients have a wider one.

    Attributes:
        expected: Whether ranks may have summands, as far as the placements of the parameters tell.
    """

    def __init__(self, parts: Sequence[LocalPart | None], dtype: torch.dtype) -> None:
        self._parts, self._dtype = parts, dtype
        self.expected = any(part is not None and part.may_be_summed for part in parts)
        self._waiting: dict[int, tuple[int, ...]] = {}  # by number, the mesh dimensions to sum over

    def take(
        self,
        grads: Iterable[tuple[int, torch.Tensor | None]],
        held: Sequence[Sequence[torch.Tensor]],
        used: Sequence[bool],
        waits: bool,
    ) -> list[torch.Tensor | None]:
        """Returns local gradients that can be added to the accumulated ones.

        Collective over the parameters' meshes, unless all sums can wait.

        Args:
            grads: Gradients with the numbers of their parameters.
            held: For each parameter, views of the accumulated gradient.
            used: For each parameter, whether anything is accumulated.
            waits: Whether sums may wait for `settle`; an accumulated gradient decides by itself.
        """
        self._forget_unused(used)
        taken: list[torch.Tensor | None] = []
        lacking: list[tuple[int, _Summand]] = []
        others: list[int] = []
        for place, (index, grad) in enumerate(grads):
            part = self._parts[index]
            if grad is None or part is None:
                taken.append(grad)
                continue
            grad = part.arriving(grad)
            dims = part.sums_over(grad)
            taken.append(part.gradient(self._widened(grad)) if dims is None else arrived(grad))
            if dims and (self._waiting.get(index) == dims if used[index] else waits):
                self._waiting[index] = dims
                continue
            others.append(index)
            if dims:
                lacking.append((place, (part, dims, [self._widened(arrived(grad))])))
        self._sum_held(held, [index for index in others if index in self._waiting])
        for (place, _), (total,) in zip(lacking, _summed([summand for _, summand in lacking])):
            taken[place] = total
        return taken

    def settle(self, held: Sequence[Sequence[torch.Tensor]], used: Sequence[bool]) -> None:
        """Sums the waiting gradients in place; collective over the parameters' meshes."""
        self._forget_unused(used)
        self._sum_held(held, [*self._waiting])

    def _widened(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in the dtype of sums; in its own where that is wider."""
        return grad.to(torch.promote_types(grad.dtype, self._dtype))

    def _forget_unused(self, used: Sequence[bool]) -> None:
        """Drops gradients that were reduced, or zeroed by the user."""
        for index in [index for index in self._waiting if not used[index]]:
            del self._waiting[index]

    def _sum_held(self, held: Sequence[Sequence[torch.Tensor]], indices: Collection[int]) -> None:
        summands: list[_Summand] = []
        for index in indices:
            part = self._parts[index]
            assert part is not None
            summands.append((part, self._waiting.pop(index), held[index]))
        for (_, _, views), totals in zip(summands, _summed(summands)):
            foreach_copy_([*views], totals)


def _summed(summands: Sequence[_Summand]) -> list[list[torch.Tensor]]:
    """Returns the totals of each summand's tensors, by one collective for all with equal mesh and dtype."""
    together: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[int]] = {}
    for place, (part, dims, tensors) in enumerate(summands):
        together.setdefault((part.mesh, dims, tensors[0].dtype), []).append(place)
    result: list[list[torch.Tensor]] = [[] for _ in summands]
    for (mesh, dims, _), places in together.items():
        tensors = [tensor for place in places for tensor in summands[place][2]]
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for dim in dims:
            dist.all_reduce(joined, group=mesh.get_group(dim))
        totals = iter(torch.split_with_sizes(joined, [tensor.numel() for tensor in tensors]))
        for place in places:
            result[place] = [next(totals).view(tensor.shape) for tensor in summands[place][2]]
    return result
