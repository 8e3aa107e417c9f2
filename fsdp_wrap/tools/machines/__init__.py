"""Machines for predictions: this one, measured, and common accelerators by data sheet."""

from fsdp_wrap.tools.machines.corrected import correct_machine
from fsdp_wrap.tools.machines.measured import Link, measure_link, measure_machine
from fsdp_wrap.tools.machines.presets import PRESETS, preset

__all__ = ["PRESETS", "Link", "correct_machine", "measure_link", "measure_machine", "preset"]
