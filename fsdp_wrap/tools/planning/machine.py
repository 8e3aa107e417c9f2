"""`Machine`: the figures of hardware that a prediction of time rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts that are alike, with one device for each rank.

    All figures are of one rank: its device, and its share of the links.

    Attributes:
        name: Shown in pages.
        flops: Floating-point operations a second that multiplications of matrices reach, by dtype ("float32",
            "bfloat16"). A dtype that is missing counts as the slowest of them.
        memory_bandwidth: Bytes a second that the device reads and writes in its own memory.
        bandwidth_within: Bytes a second that a rank receives from others of its host.
        bandwidth_between: Bytes a second that a rank receives from other hosts, while its neighbours do too.
        latency_within: Least seconds of a collective among ranks of one host.
        latency_between: Least seconds of a collective between hosts.
        ranks_per_host: How many ranks share a host.
        host_bandwidth: Bytes a second between the device and memory of its host.
        operator_seconds: Least seconds of any operator.
        overlap: From 0 to 1, the part of a collective's time in which the device computes at full speed; less
            than 1 where the cores that compute also move data.
        device_memory: Bytes that a rank may use; None if not known.
        attained: The least and the most that programs reach, as fractions of `flops` and
            `memory_bandwidth`, which are peaks then: times are predicted as a range. None where these figures
            are reached.
        source: Where the figures come from.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    bandwidth_within: float
    bandwidth_between: float
    latency_within: float = 1e-5
    latency_between: float = 3e-5
    ranks_per_host: int = 8
    host_bandwidth: float = 25e9
    operator_seconds: float = 5e-6
    overlap: float = 1.0
    device_memory: int | None = None
    attained: tuple[float, float] | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: If one is not positive, or no dtype is named.
        """
        if not self.flops:
            raise ValueError(
                f"Machine '{self.name}': flops must name a dtype at least, as in {{'float32': 1e12}}"
            )
        rates = ("memory_bandwidth", "bandwidth_within", "bandwidth_between", "host_bandwidth")
        figures = {f"flops['{dtype}']": value for dtype, value in self.flops.items()}
        figures |= {name: getattr(self, name) for name in (*rates, "ranks_per_host")}
        for name, value in figures.items():
            if not value > 0:
                raise ValueError(f"Machine '{self.name}': {name} must be positive, not {value}")
        for name in ("latency_within", "latency_between", "operator_seconds"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"Machine '{self.name}': {name} must not be negative, as {value} is")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Machine '{self.name}': overlap must be from 0 to 1, not {self.overlap}")
        if self.attained is not None and not 0 < self.attained[0] <= self.attained[1] <= 1:
            raise ValueError(
                f"Machine '{self.name}': attained must be two fractions of the peak, the lesser first, not "
                f"{self.attained}"
            )

    def flops_of(self, dtype: torch.dtype) -> float:
        """Returns floating-point operations a second in a dtype.

        Args:
            dtype: A dtype; one without a figure counts as the slowest that has one.
        """
        return self.flops.get(str(dtype).removeprefix("torch."), min(self.flops.values()))

    def at(self, attained: float) -> Machine:
        """Returns the machine with a fraction of its peak FLOP/s and memory bandwidth, as programs reach it.

        Args:
            attained: The fraction, such as 0.5.
        """
        return dataclasses.replace(
            self,
            flops={dtype: value * attained for dtype, value in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth * attained,
            attained=None,
            source=f"{self.source}; {attained:.0%} of the peak computed",
        )

    @property
    def expected(self) -> Machine:
        """The machine in the middle of what may be attained."""
        return self if self.attained is None else self.at(sum(self.attained) / 2)

    @property
    def title(self) -> str:
        """Its name, and where `attained` is a range, the fractions of the peak that times assume."""
        if self.attained is None:
            return self.name
        least, most = self.attained
        return f"{self.name}, {(least + most) / 2:.0%} of its peak ({least:.0%} to {most:.0%})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as `from_dict` takes them, of types that JSON knows."""
        return {**dataclasses.asdict(self), "flops": dict(self.flops)}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Machine:
        """Makes a machine of the figures that `to_dict` returned.

        Args:
            figures: The figures, by name.

        Raises:
            ValueError: If a figure is missing, unknown or out of range.
        """
        try:
            attained = figures.get("attained")
            return cls(**{**figures, "attained": None if attained is None else tuple(attained)})
        except TypeError as error:
            raise ValueError(f"these are not the figures of a machine: {error}") from error
