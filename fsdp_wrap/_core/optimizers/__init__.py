"""Optimizers as users give them: how often they step, and what they compute with.

Lives here: the hooks on steps, and the trial that finds out whether an optimizer is elementwise.
May import: `_core`.
Must never know: how parameters are sharded; the caller tells which ones are pieces.
"""
