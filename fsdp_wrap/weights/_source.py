"""`weight_source`: full tensors of a model in training, as an inference engine wants them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Literal, NamedTuple

import torch
from torch import nn

from fsdp_wrap._core import nbytes_of
from fsdp_wrap._state import FullParams, check_dtype
from fsdp_wrap.weights._adapters import cast, merged
from fsdp_wrap.weights._fuse import Rules, check_rules, fused
from fsdp_wrap.weights._recipes import Formula, SourceTensor

_DOING = "weight_source()"


class WeightMeta(NamedTuple):
    """Name, dtype and shape of a tensor.
    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def weight_source(
    model: nn.Module,
    rename: Callable[[str], str] | None = None,
    fuse: Rules | None = None,
    dtype: torch.dtype | None = None,
    budget: int | str = "1GB",
    adapters: Literal["merge", "apart"] = "merge",
    *,
    buffers: bool = True,
    rank0_only: bool = False,
) -> WeightSource:
    """Gives the full tensors of a model in training, one after the other, to whoever else computes with them.

    It has the protocol of vLLM's `WeightSource`: `metadata()`, and iteration over (name, tensor). Every rank
    makes it, and iterates over it, with the same arguments. Names are those of the unwrapped module, in its
    order. A tied parameter comes once, under its first name.

    Args:
        model: Wrapped by `FullyShardedDataParallel` or `fully_shard`, in whole or in part.
        rename: Takes a name, after `fuse` and `adapters`, and returns that which the engine has for it.
        fuse: By the name of a fused tensor of the engine, the names of its parts. Parts in a tuple, as
            `{"qkv_proj": ("q_proj", "k_proj", "v_proj")}`, are joined along the first dimension, wherever one
            of them is a component of a name. A pattern with a number, as `{"experts.w1": "experts.*.w1"}`, is
            stacked along a new first dimension. Rules apply one after the other, each to the results of those
            before.
        dtype: Dtype of floating-point tensors, save those of tensor subclasses; None for the master dtype.
            They are cast before they travel, merged ones afterwards. 4-bit weights of bitsandbytes travel as
            codes, and are given as the numbers that these mean.
        budget: The most bytes alive on a rank of what is on its way and what is being made, of the tensor
            yielded last, and the one before, which a loop's variable still holds. A number or a text such as
            "500MB". The largest tensor is allowed in any case.
        adapters: "merge" adds the active LoRA adapters of peft to their weights, tensor by tensor, and gives
            the names that the model has without them. "apart" gives all tensors as the model has them.
        buffers: Also the persistent buffers, at the end: those of the first rank where they differ.
        rank0_only: Only the first rank keeps tensors; the others get them on the meta device.

    Raises:
        RuntimeError: Inside a forward, a backward or `summon_full_params`; if a parameter is on the meta
            device.
        TypeError: If an argument is of another type.
        ValueError: If a rule of `fuse` fits nothing or its parts do not fit together, two tensors get one
            name, an adapter is not plain LoRA of a linear layer, or `budget` is no number of bytes.
    """
    if adapters not in ("merge", "apart"):
        raise ValueError(f"adapters must be 'merge' or 'apart', not {adapters!r}")
    if rename is not None and not callable(rename):
        raise TypeError(f"rename must be a function or None, not a {type(rename).__name__}")
    rules, nbytes = check_rules(fuse), nbytes_of(budget, "budget")
    check_dtype(dtype)
    params = FullParams(model, _DOING, buffers=buffers, numbers=True)
    plain = {name: SourceTensor(name, *described) for name, described in params.described().items()}
    made: dict[str, Formula]
    if adapters == "merge":
        made = merged(model, plain, dtype, params.subclasses)
    else:
        made = {name: cast(tensor, dtype, params.subclasses) for name, tensor in plain.items()}
    return WeightSource(model, _renamed(fused(made, rules), rename), nbytes, buffers, rank0_only)


def _renamed(made: dict[str, Formula], rename: Callable[[str], str] | None) -> dict[str, Formula]:
    if rename is None:
        return made
    renamed: dict[str, Formula] = {}
    before: dict[str, str] = {}
    for name, formula in made.items():
        new = rename(name)
        if not isinstance(new, str):
            raise TypeError(f"rename must return a name, and returned {new!r} for '{name}'")
        if new in renamed:
            raise ValueError(f"rename makes '{new}' of both '{before[new]}' and '{name}'")
        renamed[new], before[new] = formula, name
    return renamed


class WeightSource:
    """Full tensors of a model by name, as `weight_source` describes them; may be iterated over repeatedly.

    Each iteration is collective, and gives the values that the model has when it begins. Breaking off early
    takes part in the remaining gathers, since the other ranks cannot know: it saves nothing.

    Attributes:
        model: The model.
    """

    def __init__(
        self, model: nn.Module, made: dict[str, Formula], budget: int, buffers: bool, rank0_only: bool
    ) -> None:
        self.model, self._made = model, made
        self._budget, self._buffers, self._rank0_only = budget, buffers, rank0_only

    def metadata(self) -> list[WeightMeta]:
        """Returns name, dtype and shape of each tensor, in order; nothing is communicated."""
        return [WeightMeta(name, made.dtype, tuple(made.shape)) for name, made in self._made.items()]

    def refuse_subclasses(self, doing: str) -> None:
        """Refuses what takes plain tensors only.

        Args:
            doing: What takes them, for the message.

        Raises:
            TypeError: If a tensor is of a tensor subclass.
        """
        self._params().refuse_subclasses(doing)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        params = self._params()
        return self._iterate(params.stream(budget=self._room(), rank0_only=self._rank0_only))

    def _params(self) -> FullParams:
        params = FullParams(self.model, _DOING, buffers=self._buffers, numbers=True)
        takes = [taken for made in self._made.values() for taken in made.sources]
        params.choose({taken.key: taken.dtype for taken in takes})
        return params

    def _iterate(self, stream: Generator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        with closing(stream):
            for name, made in self._made.items():
                yield name, made.make(lambda: next(stream)[1])

    def _room(self) -> int:
        """Returns the budget of gathers, beside a tensor that is made and the one before it."""
        most = max((made.nbytes_beside for made in self._made.values()), default=0)
        return max(self._budget - 2 * most, 1)
