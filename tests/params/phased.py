"""Matrices that compute with codes by rows in forward and by columns in backward, as TransformerEngine's.

`Eights` has blocks of 32 and scales that are powers of two, as MXFP8; `Fours` has blocks of 16 and two codes
in a byte, and its columns are stored transposed, as NVFP4. Both are gathered by what the state of their FSDP
module tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from fsdp_wrap import compat
from params.subclasses import Rounded

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def group_around(module: nn.Module) -> Any:
    """Finds the parameter group of the FSDP module around a module as TransformerEngine does."""
    if hasattr(module, "_get_fsdp_state"):
        return module._get_fsdp_state()._fsdp_param_group
    if "_cached_parent_fsdp_state" not in module.__dict__:
        known = _composable_state._module_state_mapping
        around = [unit for unit in known.keys() if any(module is below for below in unit.modules())]
        nearest: Any = min(around, key=lambda unit: len([*unit.modules()]))
        module._cached_parent_fsdp_state = nearest._get_fsdp_state()
    return module._cached_parent_fsdp_state._fsdp_param_group


class Full(torch.Tensor):
    """A full matrix: codes and scales by rows, by columns, or both."""

    @staticmethod
    def __new__(cls, size: Any, dtype: torch.dtype, rows: Any, columns: Any, kind: Any) -> Full:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype)

    def __init__(self, size: Any, dtype: Any, rows: Pair | None, columns: Pair | None, kind: Any) -> None:
        self.rows, self.columns, self.kind = rows, columns, kind

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole = args[0]
        as_it_is = func is aten.as_strided.default and tuple(args[1]) == tuple(whole.shape)
        if as_it_is or func in (aten.detach.default, aten.alias.default, aten.view_as.default):
            return cls(whole.shape, whole.dtype, whole.rows, whole.columns, whole.kind)
        raise NotImplementedError(f"{func} of a matrix of codes")


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kind: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        rows = weight.rows if isinstance(weight, Full) else kind.by_rows(weight.detach())
        assert rows is not None, "a forward needs rows"
        return x @ kind.of_rows(rows, weight.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        columns = weight.columns if isinstance(weight, Full) else ctx.kind.by_columns(weight.detach())
        assert columns is not None, "a backward needs columns"
        return (
            grad @ ctx.kind.of_columns(columns, weight.dtype),
            grad.flatten(0, -2).T @ x.flatten(0, -2),
            None,
        )


class Phased(Rounded):
    """A matrix that trains in its own dtype, and is gathered as codes."""

    block: ClassVar[int]
    told: ClassVar[list[tuple[bool, bool]]]
    """The uses of each gather: for the forward, and for the backward."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.new_zeros.default and args[1][0] % cls.block:
            return made.values_  # parts of blocks have no codes, as in TransformerEngine
        return made

    def uses(self, group: Any) -> tuple[bool, bool]:
        """Returns whether rows and whether columns are to be gathered."""
        if not group._reshard_after_forward:
            return True, True
        backward = group._training_state is TrainingState.PRE_BACKWARD
        return not backward, backward

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
        uses = self.uses(group_around(module))
        self.told.append(uses)
        pairs = [make(self.values_) for make, used in zip((self.by_rows, self.by_columns), uses) if used]
        return tuple(tensor for pair in pairs for tensor in pair), (uses, mesh.size(), size)

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (for_forward, for_backward), ranks, size = metadata
        rows = self.joined_rows(outputs[:2], ranks) if for_forward else None
        columns = self.joined_columns(outputs[-2:], ranks) if for_backward else None
        if out is None:
            out = Full(size, param_dtype, rows, columns, type(self))
        out.rows, out.columns = rows, columns
        return out, outputs

    joined_rows = joined_columns = staticmethod(lambda pair, ranks: tuple(pair))


class Eights(Phased):
    """One byte a value, and for each 32 of them a power of two."""

    block, padded = 32, 1
    told = []

    @classmethod
    def _coded(cls, values: torch.Tensor) -> Pair:  # blocks along the last dimension
        blocks = values.unflatten(-1, (-1, cls.block)).float()
        exponents = (blocks.abs().amax(-1).clamp(min=1e-30) / 448).log2().ceil()
        codes = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        return codes.view(torch.uint8), (exponents + 127).to(torch.uint8)

    @classmethod
    def _valued(cls, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        blocks = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, cls.block))
        return (blocks * (scales.float() - 127).exp2()[..., None]).flatten(-2).to(dtype)

    @classmethod
    def by_rows(cls, values: torch.Tensor) -> Pair:
        codes, scales = cls._coded(values)
        return codes, cls._pad(scales)

    @classmethod
    def by_columns(cls, values: torch.Tensor) -> Pair:
        codes, scales = cls._coded(values.T)
        return codes.T.contiguous(), cls._pad(scales.T)

    @classmethod
    def _pad(cls, scales: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(scales, (0, 0, 0, -len(scales) % cls.padded)).contiguous()

    @classmethod
    def of_rows(cls, rows: Pair, dtype: torch.dtype) -> torch.Tensor:
        return cls._valued(rows[0], rows[1][: len(rows[0])], dtype)

    @classmethod
    def of_columns(cls, columns: Pair, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = columns
        return cls._valued(codes.T, scales[: len(codes) // cls.block].T, dtype).T

    @classmethod
    def _unpad(cls, pair: Sequence[torch.Tensor], ranks: int, per_scale: int) -> Pair:
        """Drops the padding of every rank: `per_scale` values of a column share a scale."""
        codes, scales = pair
        rows = len(codes) // ranks // per_scale
        return codes, scales.unflatten(0, (ranks, -1))[:, :rows].flatten(0, 1)

    def joined_rows(self, pair: Sequence[torch.Tensor], ranks: int) -> Pair:  # type: ignore[override]
        return self._unpad(pair, ranks, 1)

    def joined_columns(self, pair: Sequence[torch.Tensor], ranks: int) -> Pair:  # type: ignore[override]
        return self._unpad(pair, ranks, self.block)


class Padded(Eights):
    """The scales of each rank are padded to multiples of 8 rows, as for kernels: others than the codes'."""

    padded = 8
    told = []


NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Fours(Phased):
    """Two values in a byte, and for each 16 of them a scale of 8 bits; columns are stored transposed."""

    block = 16
    told = []

    @classmethod
    def by_rows(cls, values: torch.Tensor) -> Pair:
        blocks = values.unflatten(-1, (-1, cls.block)).float()
        scales = (blocks.abs().amax(-1) / 6).clamp(min=2**-9).to(torch.float8_e4m3fn)
        codes = ((blocks / scales.float()[..., None])[..., None] - NUMBERS).abs().argmin(-1).flatten(-2)
        return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales

    @classmethod
    def by_columns(cls, values: torch.Tensor) -> Pair:
        return cls.by_rows(values.T)

    @classmethod
    def of_rows(cls, rows: Pair, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = rows
        values = NUMBERS[torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()]
        return (values.unflatten(-1, (-1, cls.block)) * scales.float()[..., None]).flatten(-2).to(dtype)

    @classmethod
    def of_columns(cls, columns: Pair, dtype: torch.dtype) -> torch.Tensor:
        return cls.of_rows(columns, dtype).T

    def joined_columns(self, pair: Sequence[torch.Tensor], ranks: int) -> Pair:  # type: ignore[override]
        codes, scales = (part.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1) for part in pair)
        return codes, scales


class Mixed(Fours):
    """Blocks of 16 whose forward takes one more tensor, and scales of another dtype, than their backward."""

    told = []

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
        tensors, metadata = super().fsdp_pre_all_gather(mesh, size, stride, module, mp_policy)
        if metadata[0][0]:
            codes, scales, *columns = tensors
            tensors = (codes, scales.float(), *columns, self.values_.abs().amax().double())
        return tensors, metadata

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        given = outputs
        if metadata[0][0]:
            *given, largest = outputs  # type: ignore[assignment]
            assert largest.dtype == torch.float64 and largest.shape == (metadata[1],)
            given = [given[0], given[1].to(torch.float8_e4m3fn), *given[2:]]
        made, _ = super().fsdp_post_all_gather(given, metadata, param_dtype, out=out)
        return made, outputs


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, kind: Any) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5), kind
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Multiplied.apply(x, self.weight, self.kind) + self.bias


# nets

WIDTH, HIDDEN, BLOCKS = 64, 128, 3


class Block(nn.Module):
    def __init__(self, kind: Any, checkpointed: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = Layer(WIDTH, hidden, kind), Layer(hidden, WIDTH, kind)
        self.recomputes = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind: Any, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(BLOCKS))
        self.head, self.checkpointed = nn.Linear(WIDTH, 8), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def plain(kind: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(kind, **options).double()


def phased(net: Any) -> Any:
    for layer in net.modules():
        if isinstance(layer, Layer):
            layer.weight = nn.Parameter(layer.kind(layer.weight.detach()))
    return net


def sharded(net: Any, shard: Callable[..., Any] = fsdp_wrap.fully_shard, **options: Any) -> Any:
    for block in phased(net).blocks:
        shard(block, **options)
    shard(net, **options)
    return net


@contextmanager
def installed() -> Iterator[None]:
    """Lets classes ask torch's state, as they do with torch's own `fully_shard`."""
    for kind in (Eights, Padded, Fours, Mixed):
        kind.told.clear()
    with compat.install(fully_shard=True):
        yield
