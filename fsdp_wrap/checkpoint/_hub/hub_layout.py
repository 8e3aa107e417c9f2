"""`HubLayout`: names and shapes of a model's tensors in files of the Hub, as transformers maps them."""

from __future__ import annotations

import copy
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import WRAPPED_ATTR, listed, original_class
from fsdp_wrap._state import ReadsOnAccess
from fsdp_wrap.checkpoint._hub.block_scales import BLOCK, weights_in
from fsdp_wrap.checkpoint._hub.buffers import unsaved_buffers
from fsdp_wrap.checkpoint._hub.converted import Conversion, Kept
from fsdp_wrap.checkpoint._hub.initialised import Initialised
from fsdp_wrap.checkpoint._hub.stored import Described, StoredParams

_DEQUANTISED = ("fp8", "mxfp4")
"""Quantisations of files that transformers undoes by itself while it loads."""


class HubLayout:
    """Maps a model's tensors to those in files of the Hub and back, by transformers' own mapping.

    Args:
        model: The model on the meta device, with the dtypes of the one that is loaded or saved.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def of(cls, module: nn.Module) -> HubLayout | None:
        """Returns the layout of a model of transformers, wrapped or not; None for all else.

        Before version 5 of transformers, models have the names of the Hub themselves.
        """
        unwrapped = module._modules.get(WRAPPED_ATTR) or module
        kind = original_class(unwrapped)
        library = sys.modules.get("transformers.modeling_utils")
        loads = "transformers.core_model_loading" in sys.modules
        if library is None or not loads or not issubclass(kind, library.PreTrainedModel):
            return None
        config = copy.deepcopy(unwrapped.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return cls(kind(config))

    def as_parameters(
        self,
        given: Mapping[str, ReadsOnAccess],
        dtypes: Mapping[str, torch.dtype],
        folder: Path,
        budget: int,
    ) -> dict[str, ReadsOnAccess]:
        """Returns a file's tensors as the model's parameters and buffers, under its names.

        Args:
            given: The tensors by the files' names. Those that the model has no place for stay as they are.
            dtypes: Of the model's tensors, which dequantised ones get.
            folder: Where the files lie, with `config.json` if they are quantised.
            budget: The most bytes to convert at a time.
        """
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        own = self._model.state_dict()
        for name, tensor in own.items():
            if name in dtypes and dtypes[name] != tensor.dtype:
                tensor = self._model.get_parameter_or_buffer(name)
                tensor.data = tensor.data.to(dtypes[name])
        mapping = get_model_conversion_mapping(self._model, None, _quantiser(folder))
        renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self._model.base_model_prefix
        params: dict[str, ReadsOnAccess] = {}
        groups: dict[str, tuple[Any, dict[str, list[ReadsOnAccess]]]] = {}
        for key in sorted(given, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, own)
            if name not in own and key in own:  # which has the model's own names
                name, pattern = loading.rename_source_key(key, [], [], prefix, own)
            if name not in own:
                if not self._ignores(key, name):
                    params[key] = given[key]
            elif pattern is None:
                params[name] = given[key]
            else:
                _, sources = groups.setdefault(name, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(given[key])
        kept = Kept()
        for name, (converter, sources) in groups.items():
            conversion = Conversion(copy.deepcopy(converter), name, sources, self._model, budget, kept)
            conversion.refuse_misfits()
            params.update(conversion.tensors())
        return params

    def as_stored(self, described: Described) -> list[StoredParams]:
        """Returns what files of the Hub hold of parameters, in order."""
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        mapping = get_model_conversion_mapping(self._model, add_legacy=False)
        # Whether files had a prefix that the model lacks is known only to whoever has loaded them.
        mapping = [entry for entry in mapping if not isinstance(entry, loading.PrefixChange)]
        self._model._weight_conversions = mapping  # which the library's own function reads
        reversed_ = [entry.reverse_transform() for entry in mapping[::-1]]
        renamings = [entry for entry in reversed_ if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in reversed_ if isinstance(entry, loading.WeightConverter)]
        groups: dict[tuple[str, bool], list[str]] = {}
        for param in described:
            name, pattern = loading.apply_converters(param, converters)
            groups.setdefault((name, pattern is not None), []).append(param)
        stored = []
        for (name, converted), params in groups.items():
            if converted:
                make = partial(loading.revert_weight_conversion, self._model)
                stored.append(StoredParams.converted(params, described, make))
            else:
                name = loading.apply_renamings(params[0], renamings)
                stored.append(StoredParams.renamed(params[0], name, described[params[0]]))
        return stored

    def weights_for_fp8(self) -> tuple[dict[str, str], list[str]]:
        """Returns the module of each weight that may become fp8, and modules that transformers leaves."""
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        in_fp32 = self._model._keep_in_fp32_modules
        left = HfQuantizer.get_modules_to_not_convert(self._model, None, in_fp32)
        return weights_in(self._model, lambda path: not should_convert_module(path, left)), left

    def initialised(self, names: Collection[str], seed: int) -> dict[str, ReadsOnAccess]:
        """Returns parameters with the values that the model's class gives to new ones, the same on all ranks.

        To be called after `as_parameters`, which gives them their dtypes.
        """
        kept, params = Kept(), dict[str, Initialised]()
        for fqn in names:
            path, _, name = fqn.rpartition(".")
            owner, of_module = self._model.get_submodule(path), seed + zlib.crc32(path.encode())
            params[fqn] = Initialised(name, owner, partial(self._initialise, path), of_module, kept)
        if unset := [fqn for fqn, param in params.items() if not param.is_set]:
            raise ValueError(
                f"{type(self._model).__name__} does not initialise {listed(unset)}: give values to a model "
                "on the CPU, and load that with strict=False"
            )
        return dict(params)

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuses to initialise what is no parameter of the model."""
        known = dict(self._model.named_parameters(remove_duplicate=False))
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"initialize= names {listed(unknown)}, which the model has no parameter for")

    def cure_for(self, lacking: Iterable[str]) -> str:
        """Returns what to do if the files lack values; nothing if none of these is a parameter's."""
        known = dict(self._model.named_parameters(remove_duplicate=False))
        if params := [name for name in lacking if name in known]:
            names = listed(map(repr, params))
            return f"If the files are to lack them, such as a new head, pass initialize=[{names}]."
        return ""

    def _initialise(self, path: str) -> None:
        """Initialises a module; those around it may have another way for it, and come later."""
        while True:
            self._initialiser(path)(self._model.get_submodule(path))
            if not path:
                return
            path = path.rpartition(".")[0]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Computes the buffers that no file holds, as `from_pretrained` does.

        On a model whose parameters have no memory: what initialises a module may do so with all below it.
        """
        unset: dict[str, torch.Tensor] = {}
        owners: dict[int, nn.Module] = {}
        for fqn, owner, name, buffer in unsaved_buffers(self._model):
            owners[id(owner)] = owner
            owner._buffers[name] = unset[fqn] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
        before = {fqn: buffer.clone() for fqn, buffer in unset.items()}
        with torch.no_grad():
            for path, child in self._model.named_modules():
                if id(child) in owners:
                    self._initialiser(path)(child)
        return {
            fqn: buffer
            for fqn, _, _, buffer in unsaved_buffers(self._model)
            if not torch.equal(_bits(buffer), _bits(before[fqn]))
        }

    def _initialiser(self, path: str) -> Any:
        """Returns the function that initialises a module: a method of the innermost model around it."""
        names, innermost = path.split(".") if path else [], self._model
        for end in range(1, len(names) + 1):
            around = self._model.get_submodule(".".join(names[:end]))
            innermost = around if hasattr(around, "_init_weights") else innermost
        return innermost._init_weights

    def _ignores(self, *names: str) -> bool:
        """Whether the model's class says that a file may have a tensor which it does not use."""
        patterns = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        return any(re.search(pattern, name) for pattern in patterns for name in names)


def _unset(dtype: torch.dtype) -> float | int | bool:
    """Returns the fill value of buffers that nothing has computed yet."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min + 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def block_in(folder: Path) -> tuple[int, int]:
    """Returns rows and columns of a block with one scale, as the files' configuration says."""
    about = _quantisation(folder) or {}
    rows, columns = about.get("weight_block_size") or (BLOCK, BLOCK)
    return rows, columns


def _quantisation(folder: Path) -> dict[str, Any] | None:
    """Returns what the files' configuration says of their quantisation; None if they have none."""
    path = (folder if folder.is_dir() else folder.parent) / "config.json"
    if not path.exists():
        return None
    try:
        about: dict[str, Any] | None = json.loads(path.read_bytes()).get("quantization_config")
    except (ValueError, AttributeError) as error:
        raise RuntimeError(f"{path} is damaged: {error!r}") from error
    return about


def _quantiser(folder: Path) -> Any:
    """Returns transformers' quantiser for files that are quantised, set to undo it; None for others."""
    about = _quantisation(folder)
    if about is None:
        return None
    method = about.get("quant_method")
    if method not in _DEQUANTISED:
        raise ValueError(
            f"{folder} holds weights quantised by {method}, which only transformers can load: call "
            "from_pretrained() and shard after that, or dequantise the files first"
        )
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config({**about, "dequantize": True}, pre_quantized=True)
