"""`ShardedGradScaler`: loss scaling whose ranks agree on whether a gradient overflowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from fsdp_wrap._comm import Ranks, check_present, make_communicator


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for gradients of which each rank holds a part.

    Ranks share whether any of them found an infinite or NaN gradient, in one all-reduce for each optimizer
    and step. So all of them step or none does, and their scales never differ. A rank without any gradient
    takes part, also one that had no loss to scale (`uneven`). Gradients may be of several dtypes, float16
    among them, and live on another device than the loss.

    Call `unscale_` (or `step`) on all ranks, after a backward outside of `no_sync`.

    Args:
        device: Type of the device that computes. Scaling is disabled, with a warning, where it is "cuda" and
            there is none, like torch's: pass "cpu" there.
        init_scale: Initial scale.
        backoff_factor: Factor of the scale after a step that was skipped.
        growth_factor: Factor of it after `growth_interval` steps in a row that were not.
        growth_interval: See there.
        enabled: Otherwise `step` just steps, and all else does nothing.
        process_group: The ranks whose gradients belong together; None for all.

    Raises:
        ValueError: If a `device` other than "cuda" is not there.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if enabled and torch.device(device).type != "cuda":  # that is torch's default, and nobody's choice
            check_present(torch.device(device), "device")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group, self._has_scaled = process_group, False

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...

    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...

    def scale(self, outputs: Any) -> Any:
        """Multiplies by the scale, and keeps the dtype.

        Args:
            outputs: A tensor, or tensors in lists, tuples or other iterables.

        Raises:
            ValueError: If anything else is among them.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._has_scaled = True
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError(f"scale takes a tensor or an iterable of tensors, not {type(outputs).__name__}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:  # of a rank that had no batch: the reduction tells whether others have scaled
            super().scale(torch.zeros((), device=self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # Torch calls this before every step, also for optimizers that skip a step by themselves.
        by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
        has_inf = torch.zeros_like(found_inf)
        for flag in by_device.values():
            has_inf = torch.maximum(has_inf, flag.to(has_inf.device))
        has_inf, scaled = self._over_ranks(torch.stack([has_inf, torch.full_like(has_inf, self._has_scaled)]))
        if not self._has_scaled and not scaled:
            raise AssertionError("no rank has called scale(): go backward from scaler.scale(loss)")
        return {has_inf.device: has_inf}

    def _over_ranks(self, flags: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD if self.process_group is None else self.process_group
        if group is None:  # no distributed job: this rank is alone
            return flags
        # The loss may be on the CPU of a job that communicates on its accelerators only.
        travelling = flags.to(self._device) if flags.device.type == "cpu" else flags
        ranks = Ranks(group, dist.get_rank(group), dist.get_world_size(group))
        make_communicator(ranks, travelling.device).all_reduce([travelling], dist.ReduceOp.MAX).wait()
        return travelling.to(flags.device)
