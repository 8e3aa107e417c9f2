"""Whole programs as people publish them, small: on torch's FSDP and, unchanged, on ours, with equal numbers.

Each names torch's modules only. What they save is read by plain models of the library that they train.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from launch import client_rank, needs
from tiny_models import VOCABULARY, llama, t5

pytestmark = needs("transformers", "peft")

LENGTH, STEPS = 10, 4


def _launch(rank, world_size, port, program, ours, folder, fully_shard, *args):
    with client_rank(rank, port, ours, fully_shard):
        dist.init_process_group("gloo")
        return program(folder, *args)


def _compare(run, tmp_path, program, *args, fully_shard=False):
    """Runs a program on torch's and on ours; returns what ours said on the first rank."""
    torchs, ours = (
        run(_launch, program, ours, str(tmp_path / str(ours)), fully_shard, *args) for ours in (False, True)
    )
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


def _text_and_summary(step):
    text = _batch(step)
    return text, text[:, :5].contiguous()


def _summarise(folder):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        FullyShardedDataParallel,
        ShardingStrategy,
        StateDictType,
    )
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.t5.modeling_t5 import T5Block

    model = FullyShardedDataParallel(
        t5(use_cache=False),  # it would be filled again in the backward
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=False,
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, T5Block),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    log, best = [], float("inf")
    for _ in range(2):
        model.train()
        for step in range(STEPS // 2):
            optimizer.zero_grad()
            text, summary = _text_and_summary(step)
            loss = model(input_ids=text, attention_mask=torch.ones_like(text), labels=summary)["loss"]
            loss.backward()
            optimizer.step()
            log.append(loss.item())
        model.eval()
        with torch.no_grad():
            text, summary = _text_and_summary(10)
            (evaluated,) = _mean_over_ranks([model(input_ids=text, labels=summary)["loss"].item()])
        log.append(evaluated)
        scheduler.step()
        if evaluated < best:
            best = evaluated
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
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


# a hand-written loop on `fully_shard`: made on the meta device, prefetched by hand, saved and resumed


def _prefetch_by_hand(layers, ahead):
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - ahead) : number][::-1])


def _fill(model, full):
    """Each rank takes its part of every full tensor, as programs do that know nothing of checkpoints."""
    from torch.distributed.tensor import distribute_tensor

    sharded = {
        name: torch.nn.Parameter(distribute_tensor(full[name], param.device_mesh, param.placements))
        for name, param in model.state_dict().items()
    }
    model.load_state_dict(sharded, assign=True)


def _loop(folder, by_hand, mixed):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard

    from models import Transformer, loss_of, tokens

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()

    def make():
        with torch.device("meta"):
            model = Transformer()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        assert isinstance(model, FSDPModule)
        for param in model.parameters():
            assert isinstance(param, DTensor) and param.placements == (Shard(0),)
            assert param.dtype == torch.float32
        if by_hand:
            _prefetch_by_hand(model.blocks, 2)
        return model

    def train(model, optimizer, steps):
        log = []
        for step in steps:
            if by_hand:
                model.unshard()
            loss = loss_of(model, tokens(dist.get_rank(), step))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.append((loss.item(), norm.full_tensor().item()))
        return log

    torch.manual_seed(0)
    first = make()
    _fill(first, Transformer().state_dict())
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-2)
    log = train(first, optimizer, range(STEPS))
    full = {name: param.full_tensor() for name, param in first.state_dict().items()}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=whole))  # as if from a file
    second = make()
    _fill(second, full)
    resumed = torch.optim.Adam(second.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(second, resumed, moments, options=options)
    later = range(STEPS, STEPS + 2)
    assert train(second, resumed, later) == (rest := train(first, optimizer, later))
    return log + rest


@pytest.mark.parametrize("by_hand, mixed", [(False, False), (True, True)], ids=["plain", "prefetch, bf16"])
def test_a_loop_on_fully_shard(run, tmp_path, by_hand, mixed):
    log = _compare(run, tmp_path, _loop, by_hand, mixed, fully_shard=True)
    assert len(log) == STEPS + 2


# fine-tuning a Llama, all of it or adapters: a policy of two parts, accumulation, checkpoints of two kinds


def _adapters_or_layers():
    """Wraps layers, and what is trainable by itself where the rest is frozen."""
    from torch.distributed.fsdp.wrap import (
        _or_policy,
        lambda_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def trainable_leaf(module):
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    policies = [
        functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable_leaf),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    ]
    return functools.partial(_or_policy, policies=policies)


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
        auto_wrap_policy=_adapters_or_layers() if lora else _layers_alone(),
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


def _layers_alone():
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})


@pytest.mark.parametrize("lora", [False, True], ids=["all", "adapters"])
def test_fine_tuning_a_llama(run, tmp_path, lora):
    log, moments = _compare(run, tmp_path, _fine_tune, lora)
    assert len(log) == STEPS + 1 and all(norm > 0 for _, norm in log[:-1])
    assert lora or moments == len(list(llama().parameters()))


# preferences: a policy and a frozen reference, both wrapped; optimizer state on the first rank


def _log_probability(model, text):
    logits = model(input_ids=text).logits[:, :-1]
    return -F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").sum(-1)


def _prefer(folder):
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecision,
        StateDictType,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    options = {
        "auto_wrap_policy": _layers_alone(),
        "mixed_precision": MixedPrecision(param_dtype=torch.float32),
        "use_orig_params": False,
        "device_id": torch.device("cpu"),
    }
    policy, reference = FSDP(llama(), **options), FSDP(llama(1), **options).eval()
    reference.requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-3)
    log = []
    for step in range(STEPS):
        chosen, rejected = _batch(2 * step), _batch(2 * step + 1)
        text = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = _log_probability(reference, text)
        margin = _log_probability(policy, text) - before
        loss = -F.logsigmoid(0.1 * (margin[:2] - margin[2:])).mean()
        loss.backward()
        norm = policy.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), norm.item()))
    whole = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(policy, StateDictType.FULL_STATE_DICT, *whole):
        saved = policy.state_dict()
        moments = FSDP.optim_state_dict(policy, optimizer)
    if dist.get_rank() == 0:
        torch.save(saved, f"{folder}.pt")
    return log, len(moments.get("state", ()))


def test_preferences_by_a_policy_and_its_reference(run, tmp_path):
    log, moments = _compare(run, tmp_path, _prefer)
    plain = llama()
    assert len({loss for loss, _ in log}) == STEPS and moments == len(list(plain.parameters()))
    plain.load_state_dict(torch.load(tmp_path / "True.pt"))
    torch.testing.assert_close(
        torch.load(tmp_path / "True.pt"), torch.load(tmp_path / "False.pt"), rtol=1e-4, atol=1e-5
    )
