"""What is refused of a module's parameters and buffers before it becomes a unit."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_wrap._modules import Ignored, ParamSlot, collect_borrowed, own_modules
from fsdp_wrap._torch_private import optimizers_in_backward

__all__ = ["check_borrowed", "check_buffers", "check_param", "refuse_optimizer_in_backward"]

_PLAIN_MODULE_OR_IGNORED = (
    "a compiled module keeps its parameters as they were and cannot show others; shard the plain module "
    "(torch.compile works on it), or leave this one out by ignored_states (ignored_params of fully_shard)"
)


def check_param(slot: ParamSlot) -> None:
    """Refuses a parameter that leaves could not stand for.

    Raises:
        TypeError: If its class may behave differently from a plain parameter, or a TorchScript module
            uses it.
        ValueError: If it has gradient hooks, or no shape yet.
    """
    param = slot.param
    for module, _ in slot.places:
        _refuse_scripted(slot.fqn, module)
    _refuse_shapeless(slot.fqn, param)
    if type(param) is not nn.Parameter:
        raise TypeError(
            f"parameter '{slot.fqn}' is a {type(param).__name__}, whose behaviour sharding would lose; "
            "ignore it with ignored_states, or make it a plain torch.nn.Parameter"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter '{slot.fqn}' has gradient hooks, which would not run: a wrapped module computes "
            "with another tensor; remove them before wrapping, and give them to the sharded parameters after "
            "it"
        )


def refuse_optimizer_in_backward(slot: ParamSlot, cure: str) -> None:
    """Refuses a parameter that an optimizer is to update in backward, where another is trained instead.

    Raises:
        ValueError: If it has one.
    """
    if optimizers_in_backward(slot.param):
        raise ValueError(
            f"parameter '{slot.fqn}' has an optimizer that is applied in backward, which would train "
            f"nothing: sharding puts another tensor in its place; {cure}"
        )


def check_borrowed(module: nn.Module, ignored: Ignored) -> None:
    """Refuses TorchScript modules that use a parameter which another unit has taken.

    Raises:
        TypeError: If there is one.
    """
    for fqn, (user, _), _ in collect_borrowed(module, ignored):
        _refuse_scripted(fqn, user)


def check_buffers(module: nn.Module, ignored: Ignored) -> None:
    """Refuses buffers that have no shape yet.

    Raises:
        ValueError: If there is one.
    """
    for prefix, each in own_modules(module, ignored.modules):
        for name, buffer in each.named_buffers(prefix, recurse=False):
            _refuse_shapeless(name, buffer)


def _refuse_scripted(fqn: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"parameter '{fqn}' belongs to a {type(module).__name__} (torch.jit.script, trace or load): "
            f"{_PLAIN_MODULE_OR_IGNORED}"
        )


def _refuse_shapeless(fqn: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"'{fqn}' is an {type(tensor).__name__} of a lazy module and has no shape yet; run one forward "
            "of the plain model on a batch before sharding it"
        )
