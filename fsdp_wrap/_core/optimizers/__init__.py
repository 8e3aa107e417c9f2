"""Optimizers as users give them: how often they step, and what must not step.

Lives here: the hooks on steps.
May import: `_core`.
Must never know: how parameters are sharded; the caller tells which ones are pieces.
"""
