"""Tiny models of transformers, with seeded values; it is imported where they are made, in the ranks."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH = 64, 12
QUIET: dict[str, Any] = {
    "logging_steps": 1,
    "seed": 0,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of trainers."""

WORDS = [f"w{i}" for i in range(60)]


def tokenizer():
    """Returns a tokenizer of whole words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[pad]", "[bos]", "[eos]", "[unk]", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[unk]"))
    words.pre_tokenizer = Whitespace()
    names = {f"{name}_token": f"[{name}]" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def text(seed, length=5):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What configurations of decoders have alike."""


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(intermediate_size=48, num_hidden_layers=3, **DECODER)
    return LlamaForCausalLM(config)


def t5(**options):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    return T5ForConditionalGeneration(config)  # its embedding is tied to encoder, decoder and head


def mixture(seed=0):
    """Returns a mixture of experts: two layers of four experts, of which each token takes two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    experts: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    # Such initial values that experts' gradients are no smaller than others.
    config = Qwen3MoeConfig(num_hidden_layers=2, initializer_range=0.2, **experts, **DECODER)
    return Qwen3MoeForCausalLM(config)
