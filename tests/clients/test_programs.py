"""Whole programs as people publish them, small: on torch's FSDP and, unchanged, on ours, with equal numbers.

Each names torch's modules only. What they save is read by plain models of the library that they train.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from launch import client_rank, needs
from tiny_models import VOCABULARY, llama, t5

pytestmark = needs("transformers", "peft")

LENGTH, STEPS = 10, 4


def _launch(rank, world_size, port, program, ours, folder, *args):
    with client_rank(rank, port, ours):
        dist.init_process_group("gloo")
        return program(folder, *args)


def _compare(run, tmp_path, program, *args):
    """Runs a program on torch's and on ours; returns what ours said on the first rank."""
    torchs, ours = (run(_launch, program, ours, str(tmp_path / str(ours)), *args) for ours in (False, True))
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    return ours[0]


def _batch(step):
    """The tokens of this rank at a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


def _mean_over_ranks(values):
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


# summarising by a T5: wrapped per block, checkpointed, evaluated after each epoch, the best one saved


def _summarise(folder):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.t5.modeling_t5 import T5Block

    model = FSDP(
        t5(use_cache=False),  # it would be filled again in the backward
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=False,
    )
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    is_block = lambda module: isinstance(module, T5Block)  # noqa: E731
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    log, best = [], float("inf")
    for _ in range(2):
        model.train()
        for step in range(STEPS // 2):
            optimizer.zero_grad()
            text, summary = _batch(step), _batch(step)[:, :5].contiguous()
            loss = model(input_ids=text, attention_mask=torch.ones_like(text), labels=summary)["loss"]
            loss.backward()
            optimizer.step()
            log.append(loss.item())
        model.eval()
        with torch.no_grad():
            text, summary = _batch(10), _batch(10)[:, :5].contiguous()
            (evaluated,) = _mean_over_ranks([model(input_ids=text, labels=summary)["loss"].item()])
        log.append(evaluated)
        scheduler.step()
        if evaluated < best:
            best = evaluated
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                saved = model.state_dict()
            if dist.get_rank() == 0:
                torch.save(saved, f"{folder}.pt")
    return log, best


def test_a_t5_that_summarises(run, tmp_path):
    log, best = _compare(run, tmp_path, _summarise)
    assert len(log) == STEPS + 2 and best < log[0]
    ours, torchs = (torch.load(tmp_path / f"{which}.pt") for which in (True, False))
    assert ours.keys() == torchs.keys() == t5().state_dict().keys()
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


# fine-tuning a Llama, all of it or adapters: a policy of two parts, accumulation, checkpoints of two kinds


def _policy(lora):
    """Wraps layers, and what is trainable by itself where the rest is frozen."""
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def trainable_leaf(module):
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    leaves = functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable_leaf)
    return functools.partial(_or_policy, policies=[leaves, layers]) if lora else layers


def _fine_tune(folder, lora):
    from peft import LoraConfig, get_peft_model
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, StateDictType

    model = llama()
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    dtypes = MixedPrecision(torch.float32, torch.float32, torch.float32)
    model = FSDP(
        model,
        auto_wrap_policy=_policy(lora),
        mixed_precision=dtypes,
        use_orig_params=lora,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    log = []
    for step in range(2 * STEPS):
        text = _batch(step)
        loss = model(input_ids=text, labels=text).loss / 2
        loss.backward()
        if step % 2:
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.append((loss.item(), norm.item()))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        pieces = model.state_dict()
        save({"model": pieces}, storage_writer=FileSystemWriter(folder))
        load({"model": pieces}, storage_reader=FileSystemReader(folder))
        model.load_state_dict(pieces)
    moments = FSDP.full_optim_state_dict(model, optimizer) if not lora else None
    with torch.no_grad():
        log.append(_mean_over_ranks([model(input_ids=_batch(0), labels=_batch(0)).loss.item()]))
    return log, len(moments["state"]) if moments else 0


@pytest.mark.parametrize("lora", [False, True], ids=["all", "adapters"])
def test_fine_tuning_a_llama(run, tmp_path, lora):
    log, moments = _compare(run, tmp_path, _fine_tune, lora)
    assert len(log) == STEPS + 1 and all(norm > 0 for _, norm in log[:-1])
    assert lora or moments == len(list(llama().parameters()))
