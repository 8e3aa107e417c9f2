"""Gradients as a whole: norms, clipping, scaling.

Lives here: what is done with all gradients of a model between backward and optimizer step.
May import: all below `_state`, and `_state`.
Must never know: how one unit reduces its gradients.
"""
