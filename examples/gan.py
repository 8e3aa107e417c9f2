"""Train a WGAN with gradient penalty: a generator and a critic, both sharded by the wrapper.

    torchrun --nproc-per-node 2 examples/gan.py

The generator learns to place points on a ring. The critic runs several times before one backward. The penalty
is on the norm of its gradient, so its backward differentiates another backward.

Prints:

    step 20: points are 0.97 from the ring
    step 40: points are 0.70 from the ring
    step 60: points are 0.47 from the ring
    step 80: points are 0.44 from the ring
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

NOISE, WIDTH, BATCH, STEPS, CRITIC_STEPS, PENALTY = 8, 64, 128, 80, 3, 1.0


def make_net(inputs: int, outputs: int) -> FSDP:
    """Makes a perceptron, each linear layer of which is a unit."""
    first, second, last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
    net = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)
    return FSDP(net, auto_wrap_policy=NameWrapPolicy("Linear"))


def points_of_ring() -> torch.Tensor:
    angle = 2 * torch.pi * torch.rand(BATCH)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1)


def penalty(critic: FSDP, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Measures how far the critic's gradient is from length 1, between real and generated points."""
    share = torch.rand(BATCH, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank
    generator, critic = make_net(NOISE, 2), make_net(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))

    torch.manual_seed(1 + rank)  # other points on each
    for step in range(1, STEPS + 1):
        for _ in range(CRITIC_STEPS):
            real = points_of_ring()
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, NOISE))
            loss = critic(fake).mean() - critic(real).mean() + PENALTY * penalty(critic, real, fake)
            loss.backward()
            of_critic.step()
            of_critic.zero_grad()
        points = generator(torch.randn(BATCH, NOISE))
        (-critic(points).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()  # of what passed through it
        if rank == 0 and step % (STEPS // 4) == 0:
            away = (points.norm(dim=1) - 2).abs().mean()
            print(f"step {step}: points are {away.item():.2f} from the ring", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
