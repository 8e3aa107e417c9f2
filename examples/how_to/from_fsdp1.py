"""From torch's FSDP1: the program behind `docs/start/from-fsdp1.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/from_fsdp1.py`.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_wrap.compat
from fsdp_wrap import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fsdp_wrap import (
    FullyShardedDataParallel as FSDP,
)
from fsdp_wrap.wrap import transformer_auto_wrap_policy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


module = make()
batch = torch.randn(4, 8, 16)

policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
model = FSDP(
    module,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    auto_wrap_policy=policy,
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(batch).float().square().mean().backward()
model.clip_grad_norm_(1.0)
optimizer.step()

config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    state = model.state_dict()
optimizer_state = FSDP.optim_state_dict(model, optimizer)

module = make()
matrices = [param for param in module.parameters() if param.ndim >= 2]
others = [param for param in module.parameters() if param.ndim < 2]
grouped = FSDP(module, auto_wrap_policy=policy, use_orig_params=True)
grouped_optimizer = torch.optim.AdamW(
    [{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3
)

with fsdp_wrap.compat.install():
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert isinstance(FullyShardedDataParallel(make()), FSDP)

theirs = TorchFSDP(make(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
theirs(batch).square().mean().backward()
their_optimizer.step()
saved, optim = get_state_dict(theirs, their_optimizer)
dcp.save({"model": saved, "optim": optim}, checkpoint_id="runs/from_fsdp1")

loaded, optim = get_state_dict(model, optimizer)  # gives the names and shapes
dcp.load({"model": loaded, "optim": optim}, checkpoint_id="runs/from_fsdp1")
set_state_dict(model, optimizer, model_state_dict=loaded, optim_state_dict=optim)

dist.destroy_process_group()
