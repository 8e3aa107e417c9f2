"""fp8 weights with a float32 scale for each block of 128 x 128, as DeepSeek's files on the Hub have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import ceil_div, clean_fqn, is_castable, original_class, walk
from fsdp_wrap._state import ReadsOnAccess
from fsdp_wrap.checkpoint._hub.stored import StoredParams, Tensors

FP8 = torch.float8_e4m3fn
BLOCK = 128
_SCALE, _WEIGHT, _EXPERTS = "_scale_inv", ".weight", ".experts."

# writing


def weights_in(module: nn.Module, is_left: Callable[[str], bool]) -> dict[str, str]:
    """Returns the module of each weight that may become fp8: of linear layers and fused experts.

    Those of routers, which choose experts, never do.

    Args:
        module: Wrapped or not.
        is_left: Whether a module's weights keep their dtype.
    """
    weights = {}
    modules = {clean_fqn(f"{path}.").strip("."): child for path, child in walk(module, all_names=True)}
    for path, child in modules.items():
        beside, _, name = path.rpartition(".")
        routes = f"{beside}.experts".lstrip(".") in modules and name.endswith(("gate", "router"))
        if routes or is_left(path):
            continue
        if original_class(child) is nn.Linear:
            weights[f"{path}{_WEIGHT}".lstrip(".")] = path
        elif name == "experts":
            own = (param for param in child._parameters if not param.endswith("bias"))
            weights |= {f"{path}.{param}": path for param in own}
    return weights


def in_blocks(
    stored: Sequence[StoredParams], weights: Mapping[str, str], always_left: Collection[str] = ()
) -> tuple[list[StoredParams], dict[str, Any]]:
    """Returns what files hold instead of the weights, and what their configuration says of it.

    Args:
        stored: What they hold in the model's dtype.
        weights: The module of each parameter that may become fp8. Either all of a module's do, or none.
        always_left: Further modules that readers must not take for fp8.

    Raises:
        ValueError: If none can become fp8.
    """
    whole = {
        weights[param]
        for part in stored
        for param in part.params
        if param in weights and not _has_blocks(part, weights)
    }
    result, left, converted = list[StoredParams](), dict[str, None](), list[str]()
    for part in stored:
        if _has_blocks(part, weights) and whole.isdisjoint(weights[param] for param in part.params):
            result.append(_quantised(part))
            converted += part.described
        else:
            result.append(part)
            left |= dict.fromkeys(filter(None, map(_module_of, part.described.items())))
    if not converted:
        raise ValueError(
            f"dtype={FP8} is for weights of linear layers and experts whose dimensions are multiples of "
            f"{BLOCK}, and this model has none: export it in another dtype"
        )
    left |= dict.fromkeys(sorted(always_left))
    around = {name[:end] for name in converted for end, letter in enumerate(name) if letter == "."}
    return result, {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in left if name not in around],
    }


def _has_blocks(part: StoredParams, weights: Mapping[str, str]) -> bool:
    """Whether all that is stored are matrices of whole blocks."""
    return all(param in weights for param in part.params) and all(
        name.endswith(_WEIGHT)
        and len(shape) == 2
        and all(size > 0 and size % BLOCK == 0 for size in shape)
        and is_castable(dtype)
        for name, (shape, dtype) in part.described.items()
    )


def _module_of(named: tuple[str, tuple[Sequence[int], torch.dtype]]) -> str | None:
    """Returns the module of a tensor that readers could take for a weight in fp8; of experts, all of them."""
    name, (shape, _) = named
    if _EXPERTS in name:
        return name.rpartition(_EXPERTS)[0] + _EXPERTS.rstrip(".")
    return name.removesuffix(_WEIGHT) if name.endswith(_WEIGHT) and len(shape) == 2 else None


def _quantised(part: StoredParams) -> StoredParams:
    described = {}
    for name, (shape, _) in part.described.items():
        described[name] = torch.Size(shape), FP8
        described[name + _SCALE] = torch.Size(size // BLOCK for size in shape), torch.float32

    def make(given: Tensors) -> Tensors:
        made, result = part.make(given), Tensors()
        for name in part.described:
            result[name], result[name + _SCALE] = _codes(made.pop(name))
        return result

    return StoredParams(part.params, described, make)


def _codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight in fp8, and by what to multiply each block; converts a row of blocks at a time."""
    rows, columns = (size // BLOCK for size in weight.shape)
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    most = torch.finfo(FP8).max
    for row, (of_row, into) in enumerate(zip(torch.split(weight, BLOCK), torch.split(codes, BLOCK))):
        numbers = of_row.to(torch.float32).view(BLOCK, columns, BLOCK)
        largest = numbers.abs().amax((0, 2))
        scale = largest / most
        scales[row] = torch.where(scale > 0, scale, 1.0)  # that of tiny numbers may be none
        numbers = numbers / scales[row][:, None]
        into.copy_(numbers.clamp_(-most, most).view(into.shape))
    return codes, scales


# reading


def dequantised(
    given: Mapping[str, ReadsOnAccess], own: Collection[str], block: Sequence[int]
) -> dict[str, ReadsOnAccess]:
    """Returns tensors of files, with numbers in place of fp8 weights and their scales.

    Args:
        given: The tensors.
        own: Names of the model's tensors, which may be scales themselves.
        block: Rows and columns of a block, where the scales are as many as that gives. Other scales are of
            equal blocks.
    """
    result = dict(given)
    for name in [name for name in given if name.endswith(_SCALE) and name not in own]:
        weight = name.removesuffix(_SCALE)
        if weight in given and (size := _block_of(given[weight], given[name], block)) is not None:
            result[weight] = Dequantised(given[weight], result.pop(name), size)
    return result


def has_scales(given: Mapping[str, ReadsOnAccess]) -> bool:
    """Whether there are scales of blocks among tensors of files."""
    return any(name.endswith(_SCALE) for name in given)


def _block_of(codes: ReadsOnAccess, scales: ReadsOnAccess, block: Sequence[int]) -> tuple[int, int] | None:
    """Returns rows and columns of a block; None if the scales are none of blocks."""
    if (
        codes.dtype != FP8
        or not scales.dtype.is_floating_point
        or not len(codes.shape) == len(scales.shape) == 2
    ):
        return None
    sizes = [*zip(codes.shape, scales.shape, block)]
    if all(ceil_div(size, of_block) == count for size, count, of_block in sizes):
        return block[0], block[1]
    if any(count == 0 or size % count for size, count, _ in sizes):
        return None
    rows, columns = (size // count for size, count, _ in sizes)
    return rows, columns


class Dequantised(ReadsOnAccess):
    """The numbers that fp8 weights and scales of their blocks mean; the last blocks may be smaller."""

    dtype = torch.float32

    def __init__(self, codes: ReadsOnAccess, scales: ReadsOnAccess, block: tuple[int, int]) -> None:
        self._codes, self._scales, self._block = codes, scales, block
        self.shape = codes.shape

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D, of whose rows all are read."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        (height, width), (_, row), (_, across) = self._block, self.shape, self._scales.shape
        first, last = start // row, ceil_div(stop, row)
        top, bottom = first // height, ceil_div(last, height)
        numbers = self._codes.read(first * row, last * row).to(self.dtype).view(-1, row)
        scales = self._scales.read(top * across, bottom * across).to(self.dtype).view(-1, across)
        for number, of_blocks in enumerate(scales, start=top):
            rows = numbers[max(0, number * height - first) : (number + 1) * height - first]
            rows.mul_(of_blocks.repeat_interleave(width)[:row])
        return numbers.view(-1)[start - first * row : stop - first * row]
