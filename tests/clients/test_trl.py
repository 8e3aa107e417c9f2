"""TRL's trainers, unmodified, by accelerate's FSDP 1 and 2: losses and gradient norms of torch's own.

Which steps programs of users make that no other client makes: the weight of the head is read outside of the
head's forward, adapters are off in the forward of the reference, two models run in one step.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from launch import client_rank, needs, open_to_cpu
from tiny_models import QUIET, llama, text, tokenizer

pytestmark = needs("trl", "transformers", "accelerate", "peft", "datasets")

STEPS = 2
CASES = [
    *itertools.product(
        (1, 2),
        ("SFT", "DPO", "KTO", "Reward", "GRPO"),
        ("plain", "peft", "checkpointing", "peft and checkpointing"),
    ),
    *itertools.product((1, 2), ("DPO", "KTO"), ("precomputed",)),
]


def _data(kind):
    from datasets import Dataset

    columns = {
        "SFT": "prompt completion",
        "DPO": "prompt chosen rejected",
        "KTO": "prompt completion",
        "Reward": "chosen rejected",
        "GRPO": "prompt",
    }[kind].split()
    rows: dict[str, list[Any]] = {
        name: [text(16 * column + row) for row in range(16)] for column, name in enumerate(columns)
    }
    if kind == "KTO":
        rows["label"] = [i % 2 == 0 for i in range(16)]
    return Dataset.from_dict(rows)


def _rewards(completions, **_):
    return [float(sum(map(len, text.split()))) + len(set(text)) for text in completions]


def _fsdp(version):
    common = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": version}
    return common if version == 2 else {**common, "use_orig_params": True, "sync_module_states": False}


def _arguments(kind, version, variant, folder):
    import trl

    options: dict[str, dict[str, Any]] = {
        "DPO": {"max_length": 16, "precompute_ref_log_probs": variant == "precomputed"},
        "KTO": {"max_length": 16, "precompute_ref_log_probs": variant == "precomputed"},
        "GRPO": {"max_completion_length": 6, "num_generations": 2, "beta": 0.1},
    }
    return getattr(trl, f"{kind}Config")(
        output_dir=folder,
        fsdp=True,
        fsdp_config=_fsdp(version),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_steps=STEPS,
        bf16=False,
        gradient_checkpointing="checkpointing" in variant,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no",
        **QUIET,
        **options.get(kind, {}),
    )


def _class(kind):
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    return LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM


def _save_model(kind, folder):
    config = llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    _class(kind)(config).save_pretrained(folder)


def _lora(kind):
    from peft import LoraConfig, TaskType

    task = TaskType.SEQ_CLS if kind == "Reward" else TaskType.CAUSAL_LM
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)


def _trainer(kind, version, variant, folder, data):
    import trl
    from datasets import load_from_disk

    options: dict[str, Any] = {"reward_funcs": _rewards} if kind == "GRPO" else {}
    if "peft" in variant:
        options["peft_config"] = _lora(kind)
    torch.manual_seed(1)
    return getattr(trl, f"{kind}Trainer")(
        model=_class(kind).from_pretrained(f"{folder}/model"),  # the reference is loaded from there as well
        args=_arguments(kind, version, variant, folder),
        train_dataset=load_from_disk(data),  # beside which the first rank writes what others read
        processing_class=tokenizer(),
        **options,
    )


def _train(rank, world_size, port, ours, version, kind, variant, folder):
    """Returns loss and gradient norm of each step."""
    with client_rank(rank, port, ours, version == 2), contextlib.ExitStack() as stack:
        if not ours:
            open_to_cpu(stack)
        trainer = _trainer(kind, version, variant, folder, f"{folder}/data of {ours}")
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [(entry["loss"], entry["grad_norm"]) for entry in logs]


@pytest.mark.left_over(4)
@pytest.mark.parametrize("version, kind, variant", CASES)
def test_training_equals_torchs(run, tmp_path, version, kind, variant):
    _save_model(kind, tmp_path / "model")
    for ours in (False, True):
        _data(kind).save_to_disk(tmp_path / f"data of {ours}")
    expected = run(_train, False, version, kind, variant, str(tmp_path))
    losses = run(_train, True, version, kind, variant, str(tmp_path))
    assert len(expected[0]) == STEPS and all(norm > 0 for _, norm in expected[0])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
