"""Frozen 4-bit weights of bitsandbytes: codes that are sharded, and scales that each rank has whole.

See https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn.modules import Int8Params, Params4bit
from bitsandbytes.utils import unpack_tensor_to_dict
from torch import nn

from fsdp_wrap._params import SideData, seams_of_side_data

_BLOB = "quant_state.bitsandbytes__"
"""How the entry of a state dict begins that has what is no tensor, packed as one; nf4 or fp4 follows."""


_OFFSET_WIDTH = 32


class _EvenlyPacked(QuantState):  # type: ignore[misc]  # without types
    """A `QuantState` whose packed entry has the same size whatever the scales: DCP reads into equal sizes.

    Spaces fill the place that a shorter number leaves at the end.
    """

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        entries: dict[str, Any] = super().as_dict(packed)
        name = f"{_BLOB}{self.quant_type}"
        if name in entries and self.nested:
            spaces = _OFFSET_WIDTH - len(repr(self.offset.item()))
            entries[name] = torch.nn.functional.pad(entries[name], (0, spaces), value=ord(" "))
        return entries


@final
class FourBit(SideData):
    """The `QuantState` of one weight: how its codes are scaled."""

    def __init__(self, fqn: str, param: nn.Parameter) -> None:
        super().__init__(fqn, param)
        self._state: Any = self.attributes["quant_state"]

    @staticmethod
    def check(fqn: str, param: nn.Parameter, filled_later: bool) -> None:
        weight: Any = param
        if param.requires_grad:
            raise ValueError(
                f"parameter '{fqn}' is a {type(param).__name__} that requires gradients, and its codes have "
                "none: freeze it (requires_grad_(False)) and train adapters beside it"
            )
        if param.is_meta and not filled_later:
            raise ValueError(
                f"parameter '{fqn}' is a {type(param).__name__} on the meta device, without values to "
                "quantise: load and quantise each unit's weights before the unit is sharded, or in "
                "param_init_fn"
            )
        if not param.is_meta and weight.quant_state is None:
            raise ValueError(
                f"parameter '{fqn}' is a {type(param).__name__} that is not quantised yet: before "
                "sharding, move its module to its device (module.to(device)), which quantises it"
            )
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"parameter '{fqn}' was repacked for this processor by a forward in evaluation, which loses "
                "its scales: shard the model before it is evaluated"
            )

    @staticmethod
    def attributes_of(param: nn.Parameter) -> dict[str, Any]:
        state = param.quant_state  # type: ignore[attr-defined]
        beside = {} if state is None else _tensors_of(state)  # torch follows names of state dicts to them
        # Only quantising needs the module, and a copy of the model would lead back to it.
        return {**beside, **vars(param), "module": None}

    def describe(self) -> str:
        state, nested = self._state, "twice" if self._state.nested else "once"
        return (
            f"a {self.kind.__name__} of shape {tuple(state.shape)}, {state.quant_type} in {self.dtype} with "
            f"blocks of {state.blocksize}, quantised {nested}"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return _tensors_of(self._state)

    def saved(self) -> dict[str, torch.Tensor]:
        entries: dict[str, torch.Tensor] = self._state.as_dict(packed=True)
        return entries

    def misfit(self, saved: Mapping[str, Any]) -> str | None:
        own, given = self._told(self.saved()), self._told(saved)
        if given is None:
            return "the checkpoint does not say how its codes were quantised"
        assert own is not None
        differs = [name for name in own if own[name] != given.get(name)]
        if not differs:
            return None
        has = ", ".join(f"{name} {given.get(name)}" for name in differs)
        wants = ", ".join(f"{name} {own[name]}" for name in differs)
        return f"the checkpoint has {has}, and the model {wants}"

    @staticmethod
    def _told(saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what entries of a state dict say of codes, without the scales; None if they do not."""
        packed = [value for name, value in saved.items() if name.startswith(_BLOB)]
        if not packed:
            return None
        told = unpack_tensor_to_dict(packed[0])
        known = {"kind": "quant_type", "block size": "blocksize", "shape": "shape"}
        known |= {"dtype": "dtype", "nested block size": "nested_blocksize"}
        return {words: told.get(name) for words, name in known.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        given = _tensors_of(QuantState.from_dict(dict(saved), torch.device("cpu")))
        for name, tensor in self.tensors().items():
            tensor.copy_(given[name])

    def move(self, device: torch.device) -> None:
        self._state.to(device)

    def prepare(self, module: nn.Module) -> None:
        # Else a forward in evaluation puts repacked codes in the place of the gathered ones.
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        self._state.__class__ = _EvenlyPacked

    def plain(self, full: torch.Tensor) -> torch.Tensor:
        if full.is_meta:
            return torch.empty(self._state.shape, dtype=self._state.dtype, device="meta")
        codes = full.detach().to(self._state.absmax.device)
        values: torch.Tensor = dequantize_4bit(codes, self._state)
        return values.to(full.device)


def _tensors_of(state: Any) -> dict[str, torch.Tensor]:
    tensors = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        tensors |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
        tensors["nested_offset"] = state.offset
    return tensors


class EightBit(SideData):
    """Weights of 8 bits, which are refused: their modules keep the whole codes beside the parameter."""

    @staticmethod
    def check(fqn: str, param: nn.Parameter, filled_later: bool) -> None:
        raise TypeError(
            f"parameter '{fqn}' is a {type(param).__name__}, whose module would keep all 8-bit codes on each "
            "rank: load the model in 4 bits (load_in_4bit), take torchao's int8 weights, or ignore it "
            "with ignored_states (ignored_params of fully_shard)"
        )


KINDS: Mapping[type, Any] = {Params4bit: FourBit, Int8Params: EightBit}

seams_of_side_data["bitsandbytes"].fill(KINDS)
