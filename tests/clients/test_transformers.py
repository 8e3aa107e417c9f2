"""transformers' `Trainer` and `generate`, unmodified, on ours: DDP's and the plain model's results.

A `front` is "flat" or "orig", the wrapper without and with `use_orig_params`, or "composable", `fully_shard`,
which transformers takes where it is told that the version is 2.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from fronts import FRONTS
from fsdp_wrap import FSDPModule, register_fsdp_forward_method
from launch import client_rank, needs
from tiny_models import LENGTH, QUIET, VOCABULARY, llama, t5

pytestmark = needs("transformers", "accelerate", "peft")

STEPS = 6


def adapters():
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


MODELS: dict[str, Any] = {"llama": (llama, ["LlamaDecoderLayer"]), "t5": (t5, ["T5Block"])}
TRAINED: dict[str, Any] = {**MODELS, "adapters": (adapters, ["LlamaDecoderLayer"])}


def _examples():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (64, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _fsdp(front, layers, state_dict_type):
    common = {"transformer_layer_cls_to_wrap": layers, "state_dict_type": state_dict_type}
    if front == "composable":
        return {"version": 2, **common}
    wrapper = {"use_orig_params": front == "orig", "sync_module_states": False}
    return {"version": 1, "backward_prefetch": "backward_pre", **wrapper, **common}


def _arguments(folder, wrapped, layers, front, state_dict):
    from transformers import TrainingArguments

    fsdp = _fsdp(front, layers, state_dict)
    return TrainingArguments(
        output_dir=folder,
        use_cpu=not wrapped,
        fsdp=wrapped,
        fsdp_config=fsdp if wrapped else None,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=STEPS // 2,
        **QUIET,
    )


def _train(rank, world_size, port, wrapped, kind, front, state_dict, folder, resume=None):
    """Trains by the `Trainer`; returns the logged losses and gradient norms, and the evaluation's loss."""
    with client_rank(rank, port, wrapped, front == "composable"):
        from transformers import Trainer

        make, layers = TRAINED[kind]
        arguments = _arguments(folder, wrapped, layers, front, state_dict)
        data = _examples()
        trainer = Trainer(model=make(), args=arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train(resume_from_checkpoint=resume)
        if front == "composable":
            assert isinstance(trainer.model_wrapped, FSDPModule)
        evaluated = trainer.evaluate()["eval_loss"]
        if kind != "t5" and state_dict == "FULL_STATE_DICT":
            trainer.save_model(f"{folder}/final")
        log = trainer.state.log_history
        steps = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
        return steps, evaluated


@pytest.mark.shows("equal to DDP; torch's wrapper loses adapters of nested units")
@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    "kind, front, state_dict",
    [
        ("llama", "flat", "SHARDED_STATE_DICT"),
        ("llama", "orig", "FULL_STATE_DICT"),
        ("llama", "composable", "FULL_STATE_DICT"),
        ("t5", "flat", "FULL_STATE_DICT"),
        ("t5", "orig", "SHARDED_STATE_DICT"),
        ("t5", "composable", "SHARDED_STATE_DICT"),
        *(("adapters", front, f"{kind}_STATE_DICT") for front in FRONTS for kind in ("FULL", "SHARDED")),
    ],
)
def test_trainer_equals_its_ddp_run_and_resumes_it(run, tmp_path, kind, front, state_dict):
    """With all adapters, in nested units, too; torch's wrapper loses those silently."""
    expected = run(_train, False, kind, None, state_dict, str(tmp_path / "ddp"))
    whole = run(_train, True, kind, front, state_dict, str(tmp_path / "whole"))
    assert len(expected[0][0]) == STEPS
    torch.testing.assert_close(whole, expected, rtol=0, atol=2e-4)
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}")
    assert run(_train, True, kind, front, state_dict, str(tmp_path / "resumed"), checkpoint) == whole
    if (tmp_path / "whole" / "final").exists():  # of which others make the model of the last evaluation
        loaded = _loaded(kind, tmp_path / "whole" / "final", tmp_path / "ddp" / "final").eval()
        assert _evaluate(loaded) == pytest.approx(whole[0][1], abs=1e-5)


def _loaded(kind, ours, by_ddp):
    from peft import PeftModel
    from safetensors.torch import load_file

    if kind == "llama":
        return type(llama()).from_pretrained(ours)
    adapters, expected = (load_file(folder / "adapter_model.safetensors") for folder in (ours, by_ddp))
    assert len(adapters) == 2 * 3 * 2 and adapters.keys() == expected.keys()
    return PeftModel.from_pretrained(llama(), ours)


def _sharded(model, front, layers):
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    if front != "composable":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        return FSDP(model, auto_wrap_policy=policy, use_orig_params=front == "orig")
    for layer in [module for module in model.modules() if type(module) in layers]:
        fully_shard(layer)
    return fully_shard(model)


def _generate(rank, world_size, port, kind, front, way):
    """Greedy and by beams, each rank with a prompt and a length of its own; (plain, wrapped) tokens."""
    with client_rank(rank, port, True, front == "composable"):
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        dist.init_process_group("gloo")
        make, names = MODELS[kind]
        plain, model = make().eval(), make().eval()
        layers = {type(module) for module in model.modules() if type(module).__name__ in names}
        wrapped = _sharded(model, front, layers)
        if way == "registered":
            register_fsdp_forward_method(wrapped, "generate")
        summoned = {"summoned": True, "root summoned": False}  # the latter gathers block by block
        results = []
        for options in ({"do_sample": False}, {"num_beams": 2}):
            options |= {"inputs": torch.full((1, 4), 5 + rank), "max_new_tokens": 6 + 3 * rank}
            expected = plain.generate(**options, synced_gpus=False)
            with contextlib.ExitStack() as stack:
                if way in summoned:
                    stack.enter_context(FSDP.summon_full_params(wrapped, recurse=summoned[way]))
                tokens = wrapped.generate(**options, synced_gpus=True)
            results.append((expected.tolist(), tokens.tolist()))
        return results


@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    "front, way",
    [
        *((front, way) for front in ("flat", "orig") for way in ("registered", "summoned", "root summoned")),
        ("composable", "registered"),
    ],
)
@pytest.mark.parametrize("kind", list(MODELS))
def test_generate_of_a_sharded_model(run, kind, front, way):
    for results in run(_generate, kind, front, way):
        for expected, tokens in results:
            assert tokens == expected


def _evaluate(model):
    inputs = torch.stack([example["input_ids"] for example in _examples()[:8]])
    with torch.no_grad():
        return model(input_ids=inputs, labels=inputs).loss.item()
