"""Gradients in the memory of their parameters."""

from fsdp_wrap._state import set_gradients_in_place

__all__ = ["set_gradients_in_place"]
