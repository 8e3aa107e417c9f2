"""Lets torchtitan train where there is no GPU: what stands for the parts of it that ask for one.

Of torchtitan 0.2.2 these lines need a GPU. `prepare()` replaces what they call, and nothing else:

- `tools/utils.py:37` takes "cuda" for the device where torch finds no accelerator, and others follow.
- `components/metrics.py:45` to `:95`, the monitor of memory, asks the device for what `torch.cpu` has not,
  and `distributed/utils.py:386` for its number.
- `models/moe/kernels.py:8` imports triton, which torch brings for GPUs only, and `torchtitan/__init__.py`
  imports that file. What is written in triton, called in `:90`, orders the tokens of experts that lie on
  several ranks. The file has the same for the CPU, but `models/moe/utils.py:45` never asks for it.
- `models/moe/moe.py:348` and `:399` count with `torch.histc`, which takes integers on GPUs only.

Its smallest models get fewer layers, too.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

LAYERS = 3


class _Torch:
    """torch, with a `histc` that counts integers."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def histc(self, values: torch.Tensor, bins: int, min: int, max: int) -> torch.Tensor:
        return torch.bincount(values, minlength=bins)


class _Device:
    """`torch.cpu`, and what torchtitan asks of an accelerator besides."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    empty_cache = reset_peak_memory_stats


def _load_kernels() -> None:
    """Loads the one file of torchtitan that is written in triton, of which nobody launches anything."""
    name = "torchtitan.models.moe.kernels"
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(jit=lambda kernel: kernel, language=language)
    vars(language).update(constexpr=int)
    package = importlib.util.find_spec("torchtitan")
    assert package is not None and package.submodule_search_locations is not None
    (folder,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location(name, f"{folder}/models/moe/kernels.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        spec.loader.exec_module(sys.modules[name])
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


@functools.cache
def prepare() -> None:
    """Shortens models, and puts the stand-ins in their places; call it before torchtitan is imported."""
    if not torch.cuda.is_available():
        _stand_in()
    from torchtitan.protocols.train_spec import get_train_spec

    for model in ("llama3", "llama4", "deepseek_v3"):
        get_train_spec(model).model_args["debugmodel"].n_layers = LAYERS  # type: ignore[attr-defined]


def _stand_in() -> None:
    if importlib.util.find_spec("triton") is None:
        _load_kernels()
    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        from torchtitan.components import metrics
        from torchtitan.distributed import utils
        from torchtitan.models.moe import kernels, moe
        from torchtitan.models.moe import utils as experts
    moe.torch = _Torch()
    metrics.device_module = utils.device_module = _Device()
    experts.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
