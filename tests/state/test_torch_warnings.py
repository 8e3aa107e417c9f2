"""Torch's warnings of what it will drop: none of them comes from what we do ourselves."""

from __future__ import annotations

from bed.scripts import here, on_ranks, python

PROGRAM = """
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchStateDictType

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, checkpoint, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")


def trained(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def sharded(cls, kinds, model, optimizer):
    with cls.state_dict_type(model, kinds.SHARDED_STATE_DICT):
        return model.state_dict(), cls.optim_state_dict(model, optimizer)


def wrapped(use_orig_params):
    policy = ModuleWrapPolicy({nn.Linear})
    return lambda module: FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)


def torch_wrapped(module):
    return TorchFSDP(module, device_id=torch.device("cpu"))


with warnings.catch_warnings():  # torch's own wrapper, and whoever asks its tensors, are warned
    warnings.simplefilter("ignore")
    torchs, torchs_optim = sharded(TorchFSDP, TorchStateDictType, *trained(torch_wrapped))
for name, wrap in {"flat": wrapped(False), "orig": wrapped(True), "fully_shard": fully_shard}.items():
    model, optimizer = trained(wrap)
    checkpoint.save(f"{sys.argv[1]}/{name}", model, optimizer, step=1)
    checkpoint.load(f"{sys.argv[1]}/{name}", model, optimizer)
    if not isinstance(model, FSDP):
        continue
    state, optim_state = sharded(FSDP, StateDictType, model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        for values, optim_values in ((state, optim_state), (torchs, torchs_optim)):
            model.load_state_dict(values)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim_values))
try:
    torchs["0.weight"].shape
except FutureWarning:
    print("a user's own use is warned of")
dist.destroy_process_group()
"""


def test_nothing_that_we_do_triggers_a_future_warning(tmp_path):
    """From the import on, and with an FSDP1 checkpoint of torch's, whose values are `ShardedTensor`s."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = on_ranks(2, tmp_path / "program.py", tmp_path / "run")
    done = python(*words, env=here(PYTHONWARNINGS="error::FutureWarning"))
    assert done.out.count("a user's own use is warned of") == 2
