"""`HostAdamW`: AdamW of what lies in host memory, in one pass over it.

Torch's fused kernel reads and writes each element once, but wants moments of the parameter's dtype. Moments
of another dtype are widened and rounded by pieces that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from fsdp_wrap._params import holding, to_local

_PIECE = 1 << 19
"""How many elements are widened at a time: what they take fits in a cache, and outweighs the calls."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_KINDS = (torch.float32, torch.bfloat16)

_AS_ADAMW: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Further options in groups of `AdamW`, so that each takes the other's state dict."""


class HostAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` of parameters in host memory, with moments in float32 or bfloat16.

    Its numbers with float32 are those of `AdamW(fused=True)`, and its state has the same names and shapes, so
    that each loads the other's. Moments in bfloat16 take half the memory, and half of what of it is read and
    written; they are rounded to nearest once a step. They lie in pinned memory where there is an accelerator.

    Args:
        params: Parameters or groups of them, plain or `DTensor`s, whose data lie on the CPU.
        lr: Learning rate.
        betas: Decay of the moments' running averages.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled; a parameter loses lr x weight_decay of itself in each step.
        moments: The dtype of both moments of float32 parameters: float32 or bfloat16. Moments of other
            parameters have the parameter's dtype.

    Raises:
        ValueError: If a number is out of its range, or `moments` is another dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, but is {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, but are {betas}")
        if moments not in _KINDS:
            raise ValueError(f"moments must be torch.float32 or torch.bfloat16, but is {moments}")
        self._moments = moments
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_AS_ADAMW}
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments, "_scratch": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters that have gradients.

        Args:
            closure: Computes the loss anew, as of any optimizer.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: If a parameter is not in host memory.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
                    increment_version([param])
        return loss

    def _update(self, param: Any, group: dict[str, Any]) -> None:
        held = to_local(param)
        if held.device.type != "cpu":
            raise RuntimeError(
                f"HostAdamW updates what lies in host memory, but a parameter of shape {tuple(param.shape)} "
                f"is on {held.device}: offload it (CPUOffload, CPUOffloadPolicy), or use torch.optim.AdamW"
            )
        state = self.state[param]
        if not state:
            dtype = self._moments_of(held)
            state["step"] = torch.tensor(0.0)
            state |= {name: holding(param, _zeros_like(held, dtype)) for name in _MOMENTS}
        kept = [held, *(to_local(state[name]) for name in _MOMENTS)]
        own = [tensor.contiguous() for tensor in kept]  # the same, but for what lies otherwise
        self._run(own[0], to_local(param.grad).contiguous(), own[1:], state["step"], group)
        for tensor, value in zip(kept, own):
            if tensor is not value:
                tensor.copy_(value)

    def _run(
        self,
        held: torch.Tensor,
        grad: torch.Tensor,
        moments: list[torch.Tensor],
        count: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Updates tensors whose elements lie in the same order."""
        if moments[0].dtype == held.dtype:
            _fused(held, grad.to(held.dtype), moments, count, group)
            return
        before = count.clone()
        for piece, own, *rounded in _pieces(held, grad, *moments):
            wide = [room[: part.numel()].copy_(part) for room, part in zip(self._room(), rounded)]
            _fused(piece, own.to(held.dtype), wide, count.copy_(before), group)
            for part, value in zip(rounded, wide):
                part.copy_(value)
        count.copy_(before + 1)

    def _moments_of(self, held: torch.Tensor) -> torch.dtype:
        return self._moments if held.dtype == torch.float32 else held.dtype

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scratch is None:
            self._scratch = torch.empty(_PIECE), torch.empty(_PIECE)
        return self._scratch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `AdamW`; moments get this optimizer's dtype.

        Args:
            state_dict: The state dict.

        Raises:
            ValueError: If it is of an `AdamW` that does something else.
        """
        for group in state_dict["param_groups"]:
            for key in ("amsgrad", "maximize"):
                if group.get(key):
                    raise ValueError(f"the state dict has {key}=True, which HostAdamW does not know")
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            dtype = self._moments_of(to_local(param))
            for name in _MOMENTS:
                if name in state and state[name].dtype != dtype:
                    held = to_local(state[name])
                    state[name] = holding(param, _zeros_like(held, dtype).copy_(held))


def _zeros_like(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(held.shape, dtype=dtype, device="cpu", pin_memory=torch.accelerator.is_available())


def _pieces(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yields pieces of contiguous tensors, 1-D, those at the same place together."""
    for begin in range(0, tensors[0].numel(), _PIECE):
        yield [tensor.view(-1)[begin : begin + _PIECE] for tensor in tensors]


def _fused(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: list[torch.Tensor],
    count: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Updates one tensor by torch's fused kernel, which counts the step."""
    beta1, beta2 = group["betas"]
    adamw(
        [param],
        [grad],
        moments[:1],
        moments[1:],
        [],
        [count],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
