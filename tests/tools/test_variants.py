"""Models of `shard_as` and steps of `step_of` train as the plain model does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fsdp_wrap import fit, iter_full_params, plan, preset, record_events
from fsdp_wrap.tools import shard_as, step_of
from nets import WIDTH, Block, net

COMBINATIONS = [
    {"front_end": "fully_shard", "strategy": "full", "checkpointing": "blocks"},
    {"front_end": "fully_shard", "strategy": "grad_op", "offload": "all", "wrapping": "whole"},
    {"front_end": "fully_shard", "strategy": "hybrid", "offload": "optimizer"},
    {"front_end": "wrapper", "strategy": "full", "offload": "all"},
    {"front_end": "wrapper", "strategy": "grad_op", "checkpointing": "blocks", "wrapping": "whole"},
    {"front_end": "wrapper", "strategy": "hybrid"},
]


def batches(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("sync", ["last", pytest.param("every", marks=pytest.mark.slow)])
@ranks(2)
def test_all_words_train_as_the_plain_model(rank, world_size, sync):
    plain = net(1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        seen = [batches(each, 2 * step + part) for each in range(2) for part in range(2)]
        (sum(plain(each).square().mean() for each in seen) / 4).backward()
        reference.step()
        reference.zero_grad()
    for words in COMBINATIONS:
        blocks: Any = "Block" if sync == "last" else [Block]
        model = shard_as(net(1), blocks, **words, ranks_per_host=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        turn = iter(range(4))

        def loss(model=model, turn=turn):
            return model(batches(rank, next(turn))).square().mean()

        step_once = step_of(model, optimizer, loss, accumulation=2, sync=sync)
        step_once(), step_once()
        found = dict(iter_full_params(model))
        for name, expected in plain.named_parameters():
            told = f"{name} with {words}"
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-12, msg=told)


@ranks(2)
def test_gradients_are_reduced_once_a_step_or_in_every_backward(rank, world_size):
    for sync, times in (("last", 1), ("every", 3)):
        model = shard_as(net(1), Block, wrapping="whole")
        optimizer = torch.optim.SGD(model.parameters())
        step = step_of(model, optimizer, lambda model=model: model(batches(0, 0)).mean(), 3, sync=sync)  # type: ignore[misc]
        with record_events() as events:
            step()
        assert sum(event.kind.name == "REDUCE" for event in events) == times


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
def test_precision_and_meta_models_are_as_the_words_say(front_end):
    def setup():
        with torch.device("meta"):
            model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = shard_as(model, nn.Linear, precision="bf16", front_end=front_end)
        dtypes.extend(param.dtype for param in model.parameters())
        return model, torch.optim.SGD(model.parameters()), lambda: seen.append(model(torch.ones(2, 4)).dtype)

    dtypes: list[torch.dtype] = []
    seen: list[torch.dtype] = []
    found = plan(setup, 2)
    assert set(dtypes) == {torch.float32} and set(seen) == {torch.bfloat16}
    for unit in found.units:
        assert unit.gathered_bytes == 2 * unit.parameters, "computed with in 16 bits"


def test_activations_leave_for_the_host_where_that_is_somewhere_else():
    def setup(*, checkpointing="none"):
        with torch.device("meta"):
            model: nn.Module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        model = shard_as(model, nn.Linear, checkpointing=checkpointing)
        optimizer = torch.optim.SGD(model.parameters())

        def loss():
            return model(torch.ones(4096, 512, device=device, requires_grad=True)).square().mean()

        return model, optimizer, step_of(model, optimizer, loss)

    machine = replace(preset("h100"), host_bandwidth=1e9)
    device = "cuda"
    found = fit(setup, 2, device_memory="1GB", device=device, machine=machine)
    by_word = {choice.values["checkpointing"]: choice for choice in found.choices}
    assert by_word.keys() == {"none", "blocks", "host"}
    assert by_word["host"].peak_bytes < 0.8 * by_word["none"].peak_bytes
    assert by_word["host"].predicted_seconds > 2 * by_word["none"].predicted_seconds, "of a slow bus"
    device = "cpu"
    found = fit(setup, 2, device_memory="1GB")
    assert {choice.values["checkpointing"] for choice in found.choices} == {"none", "blocks"}


def test_words_that_mean_nothing_are_refused():
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters())
    make: Any
    words: dict[str, Any]
    absent = "no module of Bloc, Conv2d; its classes are Net, Linear, ModuleList, Block"
    for make, words, message in (
        (shard_as, {"strategy": "fast"}, "strategy must be one of full, grad_op, hybrid, not 'fast'"),
        (shard_as, {"offload": True}, "offload must be one of none, optimizer, all, not True"),
        (shard_as, {"blocks": ["Bloc", nn.Conv2d]}, absent),
        (step_of, {"accumulation": 0}, "accumulation must be at least 1, not 0"),
        (step_of, {"sync": "never"}, "sync must be 'last' or 'every', not 'never'"),
    ):
        usual: Any = {"blocks": Block} if make is shard_as else {"optimizer": optimizer, "loss": torch.Tensor}
        with pytest.raises(ValueError, match=message):
            make(model, **{**usual, **words})
