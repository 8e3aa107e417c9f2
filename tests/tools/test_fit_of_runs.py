"""`fit` against runs: three questions whose answer is known from what ranks over gloo hold at their peak."""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from fsdp_wrap import FullyShardedDataParallel, fit
from fsdp_wrap.tools import Recipe, UnitRecipe, step_of
from fsdp_wrap.tools.fitting.recipe import FREED, RECOMPUTED
from fsdp_wrap.wrap import ModuleWrapPolicy

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.meters import tensors

WIDTH = 32  # parameters are few, since gloo holds what travels for a moment that differs


class Attention(nn.Module):
    """With scores of their own, which are quadratic in the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.softmax(query @ key.transpose(1, 2), dim=-1) @ value)


def setup(*, batch=2, length=64, layers=3, checkpointing="none", front_end="fully_shard"):
    """Both planned and run."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Attention() for _ in range(layers)))
    if front_end == "wrapper":
        policy = ModuleWrapPolicy({Attention})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
    else:
        names = ("", *map(str, range(layers)))
        units = tuple(UnitRecipe((name,), FREED, RECOMPUTED) for name in names)
        model = Recipe(units=units if checkpointing == "blocks" else ()).apply(model, Attention)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss():
        return model(torch.randn(batch, length, WIDTH)).square().mean()

    return model, optimizer, step_of(model, optimizer, loss)


@ranks(2)
def run(rank, world_size, path, asked):
    """Notes the most bytes of tensors in building and two steps, for each question.

    Over gloo: what ranks share the meter does not see.
    """

    def whole(values: dict[str, Any]) -> None:
        made = setup(**values)
        made[2](), made[2]()

    with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="0"):
        whole(asked[0])  # what is made once for all
        peaks = [tensors(partial(whole, values)).peak for values in asked]
    if rank == 0:
        path.write_text(json.dumps(peaks))


@pytest.mark.parametrize(
    ("vary", "fitting"),
    [
        ({"front_end": ["fully_shard"], "batch": [11, 12]}, 1),
        pytest.param({"front_end": ["wrapper"], "batch": [11, 12]}, 1, marks=pytest.mark.slow),
        pytest.param({"batch": [32], "length": [64, 96, 128, 192, 256]}, 3, marks=pytest.mark.slow),
        pytest.param(
            {"batch": [64], "layers": [2, 4], "checkpointing": ["none", "blocks"]}, 2, marks=pytest.mark.slow
        ),
    ],
    ids=["largest batch", "of the wrapper", "lengths", "configurations"],
)
def test_what_fits_is_that_of_runs(tmp_path, vary, fitting):
    asked = [dict(zip(vary, values)) for values in itertools.product(*vary.values())]
    run(path=tmp_path / "peaks.json", asked=asked, world_size=2)
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    smaller, larger = sorted(peaks)[fitting - 1 : fitting + 1]
    assert smaller * 1.02 < larger, "the question must be one that 2 % do not decide"
    limit = (smaller + larger) // 2
    if len(vary["batch"]) > 1:  # the largest is to be found, and not among those
        found = fit(setup, 2, device_memory=limit, vary={"front_end": vary["front_end"]})
        assert [choice.batch for choice in found.choices] == [11] and found.plans <= 4
        return
    found = fit(setup, 2, device_memory=limit, vary=vary)
    for choice in found.choices:
        (peak,) = (peak for each, peak in zip(asked, peaks) if each.items() >= choice.values.items())
        assert choice.peak_bytes == pytest.approx(peak, rel=0.02)
        assert choice.fits == (peak < limit)
    assert sum(choice.fits for choice in found.choices) == fitting
