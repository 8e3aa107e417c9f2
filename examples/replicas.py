"""Train replica groups with torchft: one group continues while another is down.

    torchft_lighthouse --min_replicas 1 --bind 0.0.0.0:29510
    export TORCHFT_LIGHTHOUSE=http://HOST:29510
    torchrun --standalone --nproc-per-node 8 examples/replicas.py --group 0  # on one host
    torchrun --standalone --nproc-per-node 8 examples/replicas.py --group 1  # on another one

Each group holds a copy of the model, sharded over its ranks. A group that dies costs no step: the others
repeat that step without it. When it is restarted, it gets shards from a living group and joins. The
windows of a step depend on its number and on `--global-batch`, not on the groups. Standard output has a
line of JSON for each step of a group, with the number of groups and a checksum of the first rank's shards.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchft
from lm import launch
from lm.data import Corpus, Share
from lm.launch import World
from lm.model import GPT, Block, GPTConfig
from torch import nn
from torchft.process_group import ProcessGroupGloo

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.replica_groups import join_replica_groups
from fsdp_wrap.wrap import ModuleWrapPolicy

LEARNING_RATE = 3e-3


def sharded(front: str, module: nn.Module) -> nn.Module:
    """Shards a model over the ranks of this group, by either front-end."""
    if front == "wrapper":
        return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    for block in list(module.modules()):
        if isinstance(block, Block):
            fully_shard(block)
    return fully_shard(module)


def train_step(
    model: nn.Module, manager: torchft.Manager, corpus: Corpus, world: World, options: argparse.Namespace
) -> float:
    """Computes the gradients of a step, of all groups; returns the mean loss of all its windows."""
    share = Share(
        manager.participating_rank() * world.size + world.rank,
        manager.num_participants() * world.size,
        options.global_batch,
        options.global_batch,  # in one forward
    )
    key = f"step {manager.current_step() + 1}"
    total = torch.zeros((), device=world.device)
    for batch, count in share.windows(corpus, key, options.context):
        inputs, targets = (tensor.to(world.device) for tensor in batch)
        losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        loss = losses.mean(dim=1)[:count].sum() * share.scale
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    manager.allreduce(total).wait()
    return total.item() / world.size


def checksum(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the CRC-32 of this rank's part of model and optimizer."""
    total = 0
    for param in model.parameters():
        for tensor in (param, *optimizer.state[param].values()):
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            total = zlib.crc32(own.detach().cpu().numpy().tobytes(), total)
    return total


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", type=int, required=True, help="number of this replica group")
    parser.add_argument("--front", choices=("fully_shard", "wrapper"), default="fully_shard")
    parser.add_argument("--steps", type=int, default=500, help="in all")
    parser.add_argument("--step-seconds", type=float, default=0, help="to add to each, as of a larger model")
    parser.add_argument("--global-batch", type=int, default=16, help="windows in a step, over all ranks")
    parser.add_argument("--timeout", type=float, default=30, help="seconds until a silent group is left out")
    parser.add_argument("--data", type=Path, help="text; Python's own library if left out")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    options = parse()
    corpus = Corpus.load(options.data, options.context)
    world = launch.start()
    torch.manual_seed(0)
    module = GPT(GPTConfig(options.layers, options.width, heads=2, context=options.context))
    model = sharded(options.front, module.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    timeout = timedelta(seconds=options.timeout)
    manager = torchft.Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,  # so that a group that comes back takes part in its first step
        timeout=timeout,
        replica_id=f"group_{options.group}",
    )
    join_replica_groups(manager, model, optimizer)
    stepping = torchft.Optimizer(manager, optimizer)
    while manager.current_step() < options.steps:
        stepping.zero_grad()  # agrees with the other groups on who takes this step
        loss = train_step(model, manager, corpus, world, options)
        time.sleep(options.step_seconds)
        before = manager.current_step()
        stepping.step()
        if world.is_first and manager.current_step() > before:
            line = {
                "group": options.group,
                "step": manager.current_step(),
                "loss": loss,
                "groups": manager.num_participants(),
                "checksum": checksum(model, optimizer),
                "time": round(time.time(), 3),
            }
            print(json.dumps(line), flush=True)
    dist.barrier()
    manager.shutdown(wait=False)
    launch.finish()


if __name__ == "__main__":
    main()
