"""Train with Hugging Face's `Trainer`, unchanged: `fsdp_wrap.compat` replaces torch's FSDP.

    pip install -e '.[clients]'
    torchrun --nproc-per-node 2 -m fsdp_wrap.compat --fully-shard --cpu examples/hf_trainer.py runs/hf

The program imports only torch and transformers. Started with `fsdp_wrap.compat`, the `Trainer` shards with
this library's `fully_shard`; `--cpu` allows it on a host without accelerators. The model is a small Llama. It
learns the source code of Python's library byte by byte. `from_pretrained` loads the saved model.

Prints, beside what the `Trainer` logs:

    sharded by fsdp_wrap
    step 10: loss 4.7
    step 20: loss 3.5
    step 30: loss 3.2
    loss on other text 3.2
    a plain model that is loaded from the folder has the same loss
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

CONTEXT, STEPS = 64, 30


def read_windows() -> list[dict[str, torch.Tensor]]:
    """Reads the sources as pieces of CONTEXT bytes, each byte a token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    pieces = text.long().split(CONTEXT)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small Llama by transformers' Trainer.")
    parser.add_argument("folder", help="where the Trainer saves")
    folder = parser.parse_args().folder
    set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))
    windows = read_windows()
    arguments = TrainingArguments(
        folder,
        fsdp=True,  # type: ignore[arg-type]  # transformers takes it, and its types do not say so
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_steps=STEPS,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=windows[64:], eval_dataset=windows[:64])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        kind = type(trainer.model_wrapped).__mro__[1]  # what stands before the model's own class
        print("sharded by", kind.__module__.split(".")[0])
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']:.1f}")
        print(f"loss on other text {loss:.1f}")
        with torch.no_grad():
            plain = LlamaForCausalLM.from_pretrained(folder)
            batch = {name: torch.stack([window[name] for window in windows[:64]]) for name in windows[0]}
            torch.testing.assert_close(plain(**batch).loss.item(), loss, rtol=1e-3, atol=0)
        print("a plain model that is loaded from the folder has the same loss")


if __name__ == "__main__":
    main()
