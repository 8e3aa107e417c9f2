"""Train on a Ray cluster: Ray Train starts the workers, and the model is sharded over them.

    pip install -e '.[ray]' && python examples/ray_train.py runs/ray

The script starts its own cluster on this host, with two workers. If `RAY_ADDRESS` names a running cluster, it
trains there. The workers save one checkpoint together, and the driver loads it.

Prints, beside what Ray logs:

    loaded step 30, which ended with a loss of 0.03
"""

import argparse
import os
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from fsdp_wrap import checkpoint, fully_shard

STEPS = 30


def make_net() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every worker
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def train(config: dict[str, str]) -> None:
    """Trains in each worker; Ray has made the process group."""
    model = make_net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # other data on each
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 8)
        loss = (model(x) - x.flip(1)).square().mean()  # learn to turn around
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            ray.train.report({"step": step, "loss": loss.item()})
    checkpoint.save(config["folder"], model, optimizer, {"loss": loss.item()}, step=STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on two Ray workers.")
    parser.add_argument("folder", type=Path, help="where checkpoints are saved; all workers must see it")
    folder = parser.parse_args().folder.absolute()
    ray.init(**({} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2, "include_dashboard": False}))
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="fsdp_wrap", storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()
    plain = make_net()
    loaded = checkpoint.load(folder, plain)
    print(f"loaded step {loaded.step}, which ended with a loss of {loaded['loss']:.2f}")


if __name__ == "__main__":
    main()
