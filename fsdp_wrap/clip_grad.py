"""Clipping by the norm of all gradients."""

from fsdp_wrap._state import GradientNorms

__all__ = ["GradientNorms"]
