"""`weight_source` of a model with peft's adapters: merged on the way, as peft itself merges them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import each_front, shard
from fsdp_wrap import weight_source
from fsdp_wrap.wrap import ModuleWrapPolicy
from launch import needs

pytestmark = needs("peft", "transformers")

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), Conv1D(WIDTH, 6)  # whose weight is transposed
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mix(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapted(net: nn.Module, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    base: dict[str, Any] = {"target_modules": ["up", "down"], "modules_to_save": ["head"]}
    model = get_peft_model(net, LoraConfig(r=4, lora_alpha=8, **base | options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # B begins as zeros, and the copy of the head as the head
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape, generator=generator))
    return model


def models(front: str, **options: Any) -> tuple[Any, Any]:
    """A plain model with adapters, and the same sharded."""
    torch.manual_seed(0)
    plain = adapted(Net(), **options)
    return plain, shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Block}))


@each_front
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["master", "bf16"])
@ranks(2)
def test_active_adapters_are_merged(rank, world_size, front, dtype):
    plain, model = models(front)
    source = weight_source(model, dtype=dtype)
    expected = {name: value.to(dtype or value.dtype)
                for name, value in plain.merge_and_unload().named_parameters()}  # fmt: skip
    exported = dict(source)
    assert [*exported] == [*expected] == [meta.name for meta in source.metadata()]
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value.detach(), msg=name)
    joined = dict(weight_source(model, fuse={"both": ("up", "mix")}, dtype=dtype))
    torch.testing.assert_close(joined["blocks.1.both.bias"][:6], exported["blocks.1.up.bias"])


@ranks(2)
def test_adapters_that_are_off_are_not_merged_and_apart_all_are_as_they_are(rank, world_size):
    plain, model = models("composable")
    expected = dict(plain.named_parameters())
    exported = dict(weight_source(model, adapters="apart"))
    assert [*exported] == [*expected]
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    with model.disable_adapter():
        exported = dict(weight_source(model))
    base = plain.unload()
    assert torch.equal(exported["blocks.0.up.weight"], base.blocks[0].up.weight)
    assert exported["head.weight"].shape == base.head.weight.shape


@ranks(2)
def test_two_adapters_are_both_merged(rank, world_size):
    from peft import LoraConfig

    torch.manual_seed(0)
    plain = adapted(Net(), modules_to_save=None)
    plain.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["up"], init_lora_weights=False))
    plain.base_model.set_adapter(["default", "second"])
    model = shard("orig", copy.deepcopy(plain), ModuleWrapPolicy({Block}))
    exported = dict(weight_source(model))
    merged = plain.merge_and_unload(adapter_names=["default", "second"])
    torch.testing.assert_close(exported["blocks.1.up.weight"], merged.blocks[1].up.weight.detach())


@pytest.mark.shows("refused: not plain LoRA")
@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
@ranks(2)
def test_what_is_not_plain_lora_is_refused(rank, world_size, options):
    options = options | {"target_modules": ["mix"]}
    _, model = models("orig", **options)
    with pytest.raises(ValueError, match=r"of 'base_model.model.blocks.0.mix' is not plain LoRA"):
        weight_source(model)
    assert len(dict(weight_source(model, adapters="apart"))) == len([*model.named_parameters()])
