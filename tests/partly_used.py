"""Parameters that some ranks use and others do not."""

import torch
from torch import nn

from fronts import full_state


class Partly(nn.Module):
    """Has parameters that are used by all ranks, by one, by the last without effect, and by none."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(7, 5))
        self.one = nn.Parameter(torch.randn(9, 5))
        self.zero = nn.Parameter(torch.randn(3, 5))
        self.none = nn.Parameter(torch.randn(6, 5))
        self.last = nn.Parameter(torch.randn(40))

    def forward(self, rank: int) -> torch.Tensor:
        loss = self.all.square().sum() * (rank + 1)
        if rank == 0:
            loss = loss + self.one[0].square().sum()
        if rank == 1:
            loss = loss + (self.zero * -0.0).sum()  # gradients of -0.0
        return loss + self.last[:3].square().sum()


class Wide(nn.Module):
    """Large enough to be compressed."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.wide = part, nn.Parameter(torch.randn(5000))

    def forward(self, rank: int) -> torch.Tensor:
        return self.part(rank) + self.wide.square().sum()


def assert_small_gradients_count(front: str, model: nn.Module, rank: int) -> None:
    """Asserts that gradients too small for the codec are zeros, and still gradients."""
    before = {name: value.clone() for name, value in full_state(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    (model(rank) * 1e-9).backward()
    optimizer.step()
    state = full_state(model)
    for name in ("all", "one", "zero", "last"):
        name = f"part.{name}"
        torch.testing.assert_close(state[name], before[name] * 0.95, rtol=1e-5, atol=1e-5, msg=name)
    if front == "orig":
        assert torch.equal(state["part.none"], before["part.none"])
