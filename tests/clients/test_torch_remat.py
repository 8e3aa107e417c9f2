"""torch_remat's checkpoints around and inside of our units: losses and norms of torch's FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch import client_rank, needs

pytestmark = needs("torch_remat")

WIDTH, STEPS = 8, 3


class Block(nn.Module):
    """Keeps what its first layer has computed; the rest is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        import torch_remat as remat

        wide = remat.region(self.up, "up", recompute=False)(self.norm(inputs))
        remat.recompute_needs_tensor(wide)
        return inputs + self.down(wide.relu())


class Inside(nn.Module):
    """A unit whose forward checkpoints the whole of what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        import torch_remat as remat

        output: torch.Tensor = remat.checkpoint(region_name="inside")(self.inner)(inputs)
        return output


class Net(nn.Module):
    def __init__(self, around: bool) -> None:
        super().__init__()
        self.around = around
        self.blocks = nn.ModuleList(Block() if around else Inside() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch_remat as remat

        for number, block in enumerate(self.blocks):
            called = remat.checkpoint(region_name=f"block{number}")(block) if self.around else block
            hidden = called(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


def _train(rank: int, world_size: int, port: int, ours: bool, front: str, around: bool) -> list[Any]:
    with client_rank(rank, port, ours, fully_shard=True):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model: Any = Net(around)
        if front == "composable":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        else:
            model = FSDP(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block if around else Inside}),
                use_orig_params=front == "orig",
                device_id=torch.device("cpu"),
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        log = []
        for step in range(STEPS):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(inputs).square().mean()
            loss.backward()
            if front == "composable":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()  # type: ignore[attr-defined]
            else:
                norm = model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            log.append((loss.item(), norm.item()))
        dist.destroy_process_group()
        return log


@pytest.mark.parametrize("around", [True, False], ids=["around units", "inside of units"])
@pytest.mark.parametrize("front", ["flat", "orig", "composable"])
def test_training_with_saved_regions_equals_torchs(run, front, around):
    torchs, ours = (run(_train, own, front, around) for own in (False, True))
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    assert all(norm > 0 for _, norm in ours[0])
