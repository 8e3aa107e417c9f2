"""TRL's SFT and DPO with adapters on bitsandbytes' 4-bit weights, by accelerate's FSDP 1 and 2, unmodified.

Two ranks train as one process on the pooled batch does. With FSDP 2 accelerate leaves weights in uint8 whole
on each rank. In bf16 and float32 they are sharded. With FSDP 1 transformers makes units compute in the dtype
of the storage, and peft casts to the dtype of the sharded adapters, which TRL makes bf16: float32 fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launch import Ranks, client_rank, needs
from test_trl import STEPS, _arguments, _data, _lora, _save_model
from tiny_models import tokenizer

pytestmark = needs("bitsandbytes", "trl", "transformers", "accelerate", "peft", "datasets")


def _model(folder: str, storage: str) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=getattr(torch, storage),
    )
    return AutoModelForCausalLM.from_pretrained(f"{folder}/model", quantization_config=four_bit)


def _train(rank, world_size, port, version, kind, storage, folder):
    """Returns loss and gradient norm of each step, and names of the full state dict; saves the adapters."""
    import trl
    from datasets import load_from_disk
    from safetensors.torch import load_file

    with client_rank(rank, port, True, version == 2, world_size):
        arguments = _arguments(kind, version, "peft", folder)
        if world_size == 1:
            arguments.fsdp, arguments.fsdp_config = [], {}
            arguments.per_device_train_batch_size *= 2
        torch.manual_seed(1)
        trainer = getattr(trl, f"{kind}Trainer")(
            model=_model(folder, storage),
            args=arguments,
            train_dataset=load_from_disk(f"{folder}/data"),
            processing_class=tokenizer(),
            peft_config=_lora(kind),
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        state = trainer.accelerator.get_state_dict(trainer.model)
        trainer.save_model(f"{folder}/saved by {world_size}")
        own = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in state.items()}
        if rank == 0:
            saved = load_file(f"{folder}/saved by {world_size}/adapter_model.safetensors")
            assert len(saved) == sum("lora_" in name for name in own)
            for name, value in saved.items():
                assert torch.equal(value, own[name.replace(".weight", ".default.weight")]), name
        names = sorted(own) if rank == 0 else []
        return [(entry["loss"], entry["grad_norm"]) for entry in logs], names


@pytest.mark.left_over(4)
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize(
    "version, storage", [(1, "uint8"), (1, "bfloat16"), (2, "uint8"), (2, "bfloat16"), (2, "float32")]
)
def test_training_equals_one_process_on_the_pooled_batch(run, tmp_path, version, storage, kind):
    _save_model(kind, tmp_path / "model")
    _data(kind).save_to_disk(tmp_path / "data")
    single = Ranks(1)
    try:
        expected = single(_train, version, kind, storage, str(tmp_path))
    finally:
        single.close()
    ours = run(_train, version, kind, storage, str(tmp_path))
    losses, norms = zip(*expected[0][0])
    assert len(losses) == STEPS and all(norm > 0 for norm in norms)
    for of_rank, _ in ours:
        own_losses, own_norms = zip(*of_rank)
        torch.testing.assert_close(own_losses, losses, rtol=1e-4, atol=1e-5)
        # TRL trains adapters of 4-bit models in bf16, whose norms are rounded once more.
        torch.testing.assert_close(own_norms, norms, rtol=2**-7, atol=0)
    assert ours[0][1] == expected[0][1] and any(name.endswith("absmax") for name in ours[0][1])
