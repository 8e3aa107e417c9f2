"""Clipping by the norm of all gradients."""

from fsdp_wrap._state import GradientNorms, clip_grad_norm_

__all__ = ["GradientNorms", "clip_grad_norm_"]
