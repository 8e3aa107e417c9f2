"""What is refused of a module's parameters and buffers before it becomes a unit."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_wrap._core import Contents
from fsdp_wrap._core.torch_private import optimizers_in_backward


def check_tensors(contents: Contents, instead: str | None = None) -> None:
    """Refuses what sharding would lose, or could not be done with.

    Args:
        contents: What is to become a unit.
        instead: What to do about optimizers that are applied in backward, where they would train nothing.

    Raises:
        TypeError: If a parameter's class may behave differently from a plain parameter, or a TorchScript
            module uses it.
        ValueError: If a parameter has gradient hooks or, where `instead` is given, such an optimizer; if a
            parameter or buffer has no shape yet.
    """
    for fqn, tensor in contents.tensors():
        if is_lazy(tensor):
            raise ValueError(
                f"'{fqn}' is an {type(tensor).__name__} of a lazy module and has no shape yet; run one "
                "forward of the plain model on a batch before sharding it"
            )
    for slot in contents.slots:
        for user, _ in slot.places:
            _refuse_scripted(slot.fqn, user)
        _check_param(slot.fqn, slot.param)
        if instead is not None and optimizers_in_backward(slot.param):
            raise ValueError(
                f"parameter '{slot.fqn}' has an optimizer that is applied in backward, which would train "
                f"nothing: sharding puts another tensor in its place; {instead}"
            )
    for fqn, (user, _), _ in contents.borrowed:
        _refuse_scripted(fqn, user)


def _check_param(fqn: str, param: nn.Parameter) -> None:
    if type(param) is not nn.Parameter:
        raise TypeError(
            f"parameter '{fqn}' is a {type(param).__name__}, whose behaviour sharding would lose; "
            "ignore it with ignored_states, or make it a plain torch.nn.Parameter"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter '{fqn}' has gradient hooks, which would not run: a wrapped module computes with "
            "another tensor; remove them before wrapping, and give them to the sharded parameters after it"
        )


def _refuse_scripted(fqn: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"parameter '{fqn}' belongs to a {type(module).__name__} (torch.jit.script, trace or load): "
            "a compiled module keeps its parameters as they were and cannot show others; shard the plain "
            "module (torch.compile works on it), or leave this one out by ignored_states (ignored_params of "
            "fully_shard)"
        )
