"""Parameters that transformers' operations make of a file's tensors, in part where a part is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fsdp_wrap._state import ReadsOnAccess

Sources = Mapping[str, Sequence[ReadsOnAccess]]
"""Tensors of the files by the converter's patterns."""

_STACK = "MergeModulelist"
_BY_ROWS = {"Fp8Dequantize", "Mxfp4Dequantize", "Concatenate", "Transpose", _STACK}
"""Operations that make each row of rows of their sources, if they leave dimension 0 in its place."""
_NOT_ON_META = {"Mxfp4Dequantize"}
"""Operations that read values to know the shape of their result."""
_TEMPORARY = 8
"""Bytes that an element may take while it is converted: scaled in float32, then in its own dtype."""


class Kept:
    """Keeps the last conversion: the next interval, or the next of several parameters, may need it."""

    def __init__(self) -> None:
        self._key: Any = None
        self._made: dict[str, torch.Tensor] = {}

    def get(self, key: Any, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the tensors kept under a key, or drops what is kept and makes them."""
        if self._key != key:
            self._key, self._made = None, {}
            self._made = make()
            self._key = key
        return self._made


class Conversion:
    """One of transformers' converters with all its sources, which makes one or more parameters.

    Args:
        converter: A `WeightConverter`.
        name: The first parameter that it makes.
        sources: What it makes them of.
        model: The model on the meta device, which operations ask for shapes, dtypes and the configuration.
        budget: The most bytes to convert at a time, where a part can be converted alone.
        kept: What was converted last, of all conversions of a model.
    """

    def __init__(
        self, converter: Any, name: str, sources: Sources, model: Any, budget: int, kept: Kept
    ) -> None:
        self._converter, self._name, self._sources = converter, name, sources
        self._model, self._budget, self._kept = model, budget, kept
        first, *others = converter.target_patterns
        names = [name, *(name.replace(first, other) for other in others)]
        self._params = {name: model.get_parameter_or_buffer(name) for name in names}
        self._is_stack = any(type(operation).__name__ == _STACK for operation in converter.operations)
        self._step = self._least_rows()

    def tensors(self) -> Iterator[tuple[str, Converted]]:
        """Yields the parameters by name."""
        for name, param in self._params.items():
            yield name, Converted(self, name, param.shape, param.dtype)

    def read(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yields consecutive parts of a parameter's elements from `start` to `stop`."""
        shape = self._params[name].shape
        if self._step is None:
            yield self._kept.get((self._name,), self._whole)[name].reshape(-1)[start:stop]
            return
        row = shape[1:].numel()
        at_once = self._step * max(1, self._budget // max(1, self._step * row * _TEMPORARY))
        begin = start // max(1, row) // self._step * self._step
        while begin * row < stop:
            end = min(begin + at_once, shape[0])
            made = self._kept.get((self._name, begin, end), partial(self._rows, begin, end))
            yield made[name].reshape(-1)[max(0, start - begin * row) : stop - begin * row]
            begin = end

    def refuse_misfits(self) -> None:
        """Raises RuntimeError if the sources do not make the parameters, before anything is read."""
        rows = self._params[self._name].shape[:1]
        for pattern, sources in self._sources.items():
            if self._is_stack and (len(sources),) != rows:
                raise RuntimeError(
                    f"'{self._name}' is made of {rows.numel()} tensors, and the files have {len(sources)} of "
                    f"{pattern!r}: copy all files of the model"
                )
        if not any(type(operation).__name__ in _NOT_ON_META for operation in self._converter.operations):
            self._made_of(
                {
                    pattern: [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in of]
                    for pattern, of in self._sources.items()
                }
            )

    def _least_rows(self) -> int | None:
        """Returns how many rows can be converted alone; None if only all can."""
        shape = self._params[self._name].shape
        if not shape or len(self._params) > 1 or not all(map(_keeps_rows, self._converter.operations)):
            return None
        if self._is_stack:
            return 1
        counts = {source.shape[0] if source.shape else 1 for of in self._sources.values() for source in of}
        if any(len(of) > 1 for of in self._sources.values()) or any(shape[0] % count for count in counts):
            return None
        rows: int = math.lcm(*(shape[0] // count for count in counts))
        return rows

    def _whole(self) -> dict[str, torch.Tensor]:
        return self._made_of(
            {pattern: [source.whole() for source in of] for pattern, of in self._sources.items()}
        )

    def _rows(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        rows = self._params[self._name].shape[0]
        parts = {
            pattern: [source.whole() for source in of[begin:end]]
            if self._is_stack
            else [_rows_of(source, begin, end, rows) for source in of]
            for pattern, of in self._sources.items()
        }
        return self._made_of(parts, end - begin)

    def _made_of(
        self, parts: Mapping[str, Sequence[torch.Tensor]], rows: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the parameters that sources make, or so many rows of them."""
        for pattern, tensors in parts.items():
            for tensor in tensors:
                self._converter.add_tensor(self._name, pattern, pattern, tensor)
        try:
            made = self._converter.convert(self._name, model=self._model, config=self._model.config)
        except Exception as error:  # of several libraries
            why = error.__context__ or error
            raise RuntimeError(f"'{self._name}' cannot be made of what the files hold: {why}") from error
        values = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        for name, param in self._params.items():
            wanted = [*param.shape] if rows is None else [rows, *param.shape[1:]]
            if [*values[name].shape] != wanted:
                raise RuntimeError(
                    f"size mismatch for {name}: the files make {[*values[name].shape]}, not {wanted}: "
                    "copy all files of the model"
                )
        return values


class Converted(ReadsOnAccess):
    """A parameter that a conversion makes."""

    def __init__(self, conversion: Conversion, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self._conversion, self._name = conversion, name
        self.shape, self.dtype = shape, dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""
        elements = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        at = 0
        for part in self._conversion.read(self._name, start, stop):
            elements[at : at + len(part)] = part
            at += len(part)
        return elements


def _keeps_rows(operation: Any) -> bool:
    kind = type(operation).__name__
    dims = [getattr(operation, name, 1) for name in (("dim0", "dim1") if kind == "Transpose" else ("dim",))]
    moves_rows = 0 in dims and kind != _STACK
    return kind in _BY_ROWS and not moves_rows and not getattr(operation, "check_dims", False)


def _rows_of(source: ReadsOnAccess, begin: int, end: int, rows: int) -> torch.Tensor:
    """Returns what a source has of these rows, where it may have one row for several."""
    if not source.shape:  # one number for all
        return source.whole()
    count = source.shape[0]
    first, last = begin * count // rows, end * count // rows
    row = source.shape.numel() // count
    return source.read(first * row, last * row).view(last - first, *source.shape[1:])
