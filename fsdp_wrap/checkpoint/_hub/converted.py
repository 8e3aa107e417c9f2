"""Parameters that transformers' operations make of a file's tensors, in part where a part is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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


class Conversion:
    """One of transformers' converters with all its sources, which makes one or more parameters.

    Args:
        converter: A `WeightConverter`.
        name: The first parameter that it makes.
        sources: What it makes them of.
        model: The model on the meta device, which operations ask for shapes, dtypes and the configuration.
        budget: The most bytes to convert at a time, where a part can be converted alone.
    """

    def __init__(self, converter: Any, name: str, sources: Sources, model: Any, budget: int) -> None:
        self._converter, self._name, self._sources = converter, name, sources
        self._model, self._budget = model, budget
        self._kept: tuple[str, int, int, torch.Tensor] | None = None
        first, *others = converter.target_patterns
        self.names = [name, *(name.replace(first, other) for other in others)]

    def tensors(self) -> Iterator[tuple[str, Converted]]:
        """Yields the parameters by name."""
        for name in self.names:
            param = self._model.get_parameter_or_buffer(name)
            yield name, Converted(self, name, param.shape, param.dtype)

    def read(self, name: str, shape: torch.Size, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yields consecutive parts of a parameter's elements from `start` to `stop`."""
        step = self._rows_at_once(shape)
        row = shape.numel() // shape[0] if shape else 1
        rows = shape[0] if shape else 1
        at_once = step * max(1, self._budget // max(1, step * row * _TEMPORARY))
        begin = start // row // step * step
        while begin * row < stop:
            end = min(begin + at_once, rows)
            part = self._converted(name, begin, end, rows).reshape(-1)
            yield part[max(0, start - begin * row) : stop - begin * row]
            begin = end

    def release(self) -> None:
        """Forgets what was converted last."""
        self._kept = None

    def _rows_at_once(self, shape: torch.Size) -> int:
        """Returns the fewest rows that can be converted alone; all rows, if operations mix them."""
        operations = self._converter.operations
        if not shape or len(self.names) > 1 or not all(map(_keeps_rows, operations)):
            return shape[0] if shape else 1
        if self._is_stack:
            return 1
        counts = {source.shape[0] if source.shape else 1 for of in self._sources.values() for source in of}
        if any(len(of) > 1 for of in self._sources.values()) or any(shape[0] % count for count in counts):
            return shape[0]
        rows: int = math.lcm(*(shape[0] // count for count in counts))
        return rows

    @property
    def _is_stack(self) -> bool:
        return any(type(operation).__name__ == _STACK for operation in self._converter.operations)

    def _converted(self, name: str, begin: int, end: int, rows: int) -> torch.Tensor:
        """Returns rows of a parameter, and keeps them for who asks for the rest of the last one."""
        if self._kept is None or self._kept[:3] != (name, begin, end):
            self._kept = None
            self._kept = (name, begin, end, self._convert(name, begin, end, rows))
        return self._kept[3]

    def _convert(self, name: str, begin: int, end: int, rows: int) -> torch.Tensor:
        if self._is_stack:
            parts = {
                pattern: [source.whole() for source in sources[begin:end]]
                for pattern, sources in self._sources.items()
            }
        else:
            parts = {
                pattern: [_rows_of(source, begin, end, rows) for source in sources]
                for pattern, sources in self._sources.items()
            }
        return self._made_of(parts, name, end - begin)

    def _made_of(self, parts: Mapping[str, Sequence[torch.Tensor]], name: str, rows: int) -> torch.Tensor:
        """Returns so many rows of a parameter, made of as many of its sources."""
        for pattern, tensors in parts.items():
            for tensor in tensors:
                self._converter.add_tensor(self._name, pattern, pattern, tensor)
        try:
            made = self._converter.convert(self._name, model=self._model, config=self._model.config)
        except Exception as error:  # of several libraries
            why = error.__context__ or error
            raise RuntimeError(f"'{name}' cannot be made of what the files hold: {why}") from error
        value: torch.Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        wanted = self._model.get_parameter_or_buffer(name).shape
        if [*value.shape] != [rows, *wanted[1:]][: len(wanted)]:
            raise RuntimeError(
                f"size mismatch for {name}: the files make {[*value.shape]} of {rows} rows, the model has "
                f"{[*wanted]}: copy all files of the model"
            )
        return value

    def refuse_misfits(self) -> None:
        """Raises RuntimeError if the sources do not make the parameters, before anything is read."""
        for name in self.names:
            rows = [*self._model.get_parameter_or_buffer(name).shape, 1][0]
            for pattern, sources in self._sources.items():
                if self._is_stack and len(sources) != rows:
                    raise RuntimeError(
                        f"'{name}' is made of {rows} tensors, and the files have {len(sources)} of "
                        f"{pattern!r}: copy all files of the model"
                    )
            if not any(type(operation).__name__ in _NOT_ON_META for operation in self._converter.operations):
                empty = {
                    pattern: [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in of]
                    for pattern, of in self._sources.items()
                }
                self._made_of(empty, name, rows)


class Converted(ReadsOnAccess):
    """A parameter that a conversion makes."""

    def __init__(self, conversion: Conversion, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self._conversion, self._name = conversion, name
        self.shape, self.dtype = shape, dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""
        elements = torch.empty(stop - start, dtype=self.dtype)
        at = 0
        for part in self._conversion.read(self._name, self.shape, start, stop):
            elements[at : at + len(part)] = part
            at += len(part)
        if stop == self.shape.numel():  # what comes next is another parameter
            self._conversion.release()
        return elements


def _keeps_rows(operation: Any) -> bool:
    kind = type(operation).__name__
    dims = [getattr(operation, name, 1) for name in (("dim0", "dim1") if kind == "Transpose" else ("dim",))]
    moves_rows = 0 in dims and kind != _STACK
    return kind in _BY_ROWS and not moves_rows and not getattr(operation, "check_dims", False)


def _rows_of(source: ReadsOnAccess, begin: int, end: int, rows: int) -> torch.Tensor:
    """Returns what a source has of these rows, where it may have one row for several."""
    if (begin, end) == (0, rows):
        return source.whole()
    count = source.shape[0]
    first, last = begin * count // rows, end * count // rows
    row = source.shape.numel() // count
    return source.read(first * row, last * row).view(last - first, *source.shape[1:])
