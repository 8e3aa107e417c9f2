"""Machines by name, with the figures of their makers' data sheets.

All are peaks: dense FLOP/s without sparsity, links in one direction. Programs reach a part of them, so times
are predicted as a range, or for the part that `preset(name, attained=...)` names. The network between hosts
belongs to the cluster and not to the device: where the maker sells hosts, it is theirs. To change it:
`dataclasses.replace(preset(...), bandwidth_between=...)`.
"""

from __future__ import annotations

from types import MappingProxyType

from fsdp_wrap.tools.planning import Machine

_TERA, _GIGA = 10**12, 10**9
_ATTAINED = (0.4, 0.7)
"""The part of the FLOP/s that published runs of language models reach, with what is computed again counted.

By the tables of MosaicML's llm-foundry (scripts/train/benchmarking), fully sharded in bfloat16: of models of
1 to 70 billion parameters with sequences of at most 8,192 tokens, 38 to 59 % on H100s, 45 to 79 % on A100s.
"""
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def _machine(
    name: str,
    teraflops: tuple[float, float, float, float],
    memory: tuple[int, float],
    links: tuple[float, float, float],
    source: str,
    network: str,
) -> Machine:
    """Makes a machine in the units of data sheets.

    Args:
        teraflops: In float64, float32, bfloat16 and float16, by matrix units where torch uses them by
            default; 0 for dtypes that the device lacks.
        memory: GB, and GB/s.
        links: GB/s to devices of the same host, to other hosts, and to the host's memory.
        network: The source of the figure between hosts.
    """
    size, bandwidth = memory
    within, between, host = (rate * _GIGA for rate in links)
    return Machine(
        name=name,
        flops={dtype: rate * _TERA for dtype, rate in zip(_DTYPES, teraflops) if rate},
        memory_bandwidth=bandwidth * _GIGA,
        bandwidth_within=within,
        bandwidth_between=between,
        host_bandwidth=host,
        device_memory=size * _GIGA,
        attained=_ATTAINED,
        source=f"{source}; between hosts: {network}",
    )


_V100, _A100 = "NVIDIA V100 Tensor Core GPU data sheet", "NVIDIA A100 Tensor Core GPU data sheet"
_H100, _H200 = "NVIDIA H100 Tensor Core GPU data sheet", "NVIDIA H200 Tensor Core GPU data sheet"
_B200 = "NVIDIA Blackwell Architecture Technical Brief, HGX B200 at 1000 W"
_MI300X, _MI325X = "AMD Instinct MI300X data sheet", "AMD Instinct MI325X data sheet"
_MI250X = "AMD Instinct MI250X data sheet, halved"
_DGX_1, _DGX_A100 = "DGX-1, 4 x 100 Gb/s for 8 GPUs", "DGX A100, 200 Gb/s a GPU"
_DGX_H100, _DGX_H200 = "DGX H100, 400 Gb/s a GPU", "DGX H200, 400 Gb/s a GPU"
_DGX_B200, _PLATFORM = "DGX B200, 400 Gb/s a GPU", "AMD Instinct MI300X platform, 400 Gb/s a GPU"
_PCIE, _DIE, _GPU = "assumed, 100 Gb/s a GPU", "assumed, 200 Gb/s a die", "assumed, 400 Gb/s a GPU"

_AMPERE, _HOPPER = (19.5, 19.5, 312, 312), (67, 67, 989, 989)
_CDNA2, _CDNA3 = (47.9, 47.9, 191.5, 191.5), (163.4, 163.4, 1307.4, 1307.4)

PRESETS = MappingProxyType(
    {
        "v100": _machine("V100 SXM2 32 GB", (7.8, 15.7, 0, 125), (32, 900), (150, 6.25, 16), _V100, _DGX_1),
        "a100-40gb": _machine("A100 SXM 40 GB", _AMPERE, (40, 1555), (300, 25, 32), _A100, _DGX_A100),
        "a100-80gb": _machine("A100 SXM 80 GB", _AMPERE, (80, 2039), (300, 25, 32), _A100, _DGX_A100),
        "a100-pcie-80gb": _machine("A100 PCIe 80 GB", _AMPERE, (80, 1935), (32, 12.5, 32), _A100, _PCIE),
        "l40s": _machine(
            "L40S", (1.4, 91.6, 362, 362), (48, 864), (32, 12.5, 32), "NVIDIA L40S GPU data sheet", _PCIE
        ),
        "h100": _machine("H100 SXM", _HOPPER, (80, 3350), (450, 50, 64), _H100, _DGX_H100),
        "h100-pcie": _machine("H100 PCIe", (51, 51, 756, 756), (80, 2000), (64, 12.5, 64), _H100, _PCIE),
        "h200": _machine("H200 SXM", _HOPPER, (141, 4800), (450, 50, 64), _H200, _DGX_H200),
        "b200": _machine(
            "B200 of an HGX", (40, 80, 2250, 2250), (180, 8000), (900, 50, 64), _B200, _DGX_B200
        ),
        "mi250x": _machine("MI250X, one of its two dies", _CDNA2, (64, 1638), (100, 25, 32), _MI250X, _DIE),
        "mi300x": _machine("MI300X", _CDNA3, (192, 5300), (448, 50, 64), _MI300X, _PLATFORM),
        "mi325x": _machine("MI325X", _CDNA3, (256, 6000), (448, 50, 64), _MI325X, _GPU),
    }
)
"""Machines by the names that `--machine` takes."""


def preset(name: str, *, attained: float | None = None) -> Machine:
    """Returns a machine by its name.

    Args:
        name: One of `PRESETS`, such as "h100".
        attained: The fraction of its peak FLOP/s and memory bandwidth that programs reach; None for 0.4 to
            0.7, as published runs do: predicted times are a range then.

    Raises:
        ValueError: If there is none of that name, or `attained` is not in (0, 1].
    """
    if name.lower() not in PRESETS:
        raise ValueError(f"there is no machine {name!r}; there are {', '.join(PRESETS)}")
    if attained is not None and not 0 < attained <= 1:
        raise ValueError(f"attained must be above 0 and at most 1, not {attained}")
    made = PRESETS[name.lower()]
    return made if attained is None else made.at(attained)
