"""What does not fit for the temporaries of an optimizer: it would fit, were that one fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_wrap._core import format_bytes
from fsdp_wrap.tools import Plan, fit, plan, preset
from fsdp_wrap.tools.command import main

FRONTS = pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
WIDTH, DEPTH, RANKS = 64, 24, 4

FILE = f"""
import torch
from torch import nn
from fsdp_wrap import FullyShardedDataParallel
from fsdp_wrap.tools import Recipe
from fsdp_wrap.wrap import ModuleWrapPolicy


def setup(*, front="fully_shard", rows=1, fused=False, device="cuda", make=torch.optim.AdamW):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({DEPTH})))
    if front == "wrapper":
        policy = ModuleWrapPolicy({{nn.Linear}})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device(device), use_orig_params=True
        )
    else:
        model = Recipe().apply(model, nn.Linear)
    optimizer = make(model.parameters(), **({{"fused": True}} if fused else {{}}))

    def step():
        optimizer.zero_grad()
        model(torch.empty(rows, {WIDTH}, device=device)).sum().backward()
        optimizer.step()

    return model, optimizer, step
"""
made: dict[str, Any] = {}
exec(FILE, made)
setup: Callable[..., Any] = made["setup"]


def planned(**options: Any) -> Plan:
    return plan(partial(setup, **options), RANKS, device="cuda")


@FRONTS
def test_what_fused_optimizers_would_save_is_said(front):
    plain, fused = planned(front=front), planned(front=front, fused=True)
    temporaries = plain.peak_by_kind["optimizer temporaries"]
    assert plain.unfused == ("AdamW",) and fused.unfused == () and not [*fused.avoidable()]
    assert plain.peak_at.phase == "optimizer" != fused.peak_at.phase
    assert 0.1 * plain.peak_bytes < plain.peak_bytes - fused.peak_bytes <= temporaries
    told = f"{format_bytes(temporaries)} of it are temporaries: AdamW(fused=True) makes none"
    assert [*plain.avoidable()] == [told]
    assert Plan.from_json(plain.to_json()) == plain
    assert f"\n  {told}\n" in str(plain) and "makes none" not in str(fused)


def test_what_would_not_help_is_not_said():
    decays = partial(torch.optim.RMSprop, momentum=0.9)
    for options in ({"make": decays}, {"rows": 1 << 16}, {"fused": True}):
        outcome = planned(**options)
        assert not [*outcome.avoidable()], options
        assert outcome.unfused == (("AdamW",) if "rows" in options else ())


@pytest.mark.parametrize(
    ("make", "device"),
    [(torch.optim.SGD, "cuda"), (torch.optim.Adam, "cuda"), (torch.optim.Adagrad, "cpu")],
)
@FRONTS
def test_fused_kernels_are_planned(front, make, device):
    """Also those for which torch has no rule on tensors without values."""
    options = {"front": front, "make": make, "fused": True, "device": device}
    planned = plan(partial(setup, **options), RANKS, device=device)
    assert "optimizer temporaries" not in planned.peak_by_kind and planned.unfused == ()


@FRONTS
def test_several_optimizers_are_named(front):
    def several() -> Any:
        model, *_ = setup(front=front)
        *most, last = model.parameters()
        optimizers = [torch.optim.AdamW(most), torch.optim.Adam([last], foreach=True)]

        def both() -> None:
            model(torch.empty(1, WIDTH, device="cuda")).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for param in model.parameters():
                param.grad = None

        return model, optimizers, both

    planned = plan(several, RANKS, device="cuda")
    assert planned.unfused == ("AdamW", "Adam")
    assert "AdamW(fused=True) and Adam(fused=True) makes none" in "".join(planned.avoidable())


def test_fit_and_the_command_say_it(tmp_path: Path, capsys: Any) -> None:
    limit = planned().peak_bytes - 1

    def its_own() -> Any:
        return setup()

    report = fit(
        its_own, [RANKS, 2 * RANKS], device="cuda", device_memory=f"{limit}B", machine=preset("h100")
    )
    assert [(choice.ranks, choice.fits) for choice in report.choices] == [(8, True), (4, False)]
    report = fit(its_own, RANKS, device="cuda", device_memory=f"{limit}B", machine=preset("h100"))
    assert "kB of it are temporaries: AdamW(fused=True) makes none. Take more ranks, " in str(report)
    (tmp_path / "mine.py").write_text(FILE)
    command = ["plan", f"{tmp_path}/mine.py:setup", "--device", "cuda", "--ranks", "4", "--device-memory"]
    for machine, page in (([], ""), (["--machine", "h100"], ", does NOT fit in ")):
        assert main([*command, f"{limit}B", *machine]) == 1
        out = capsys.readouterr().out
        assert "4 ranks: does not fit, " in out and "but 8 ranks: fits, " in out
        assert out.count("kB of it are temporaries: AdamW(fused=True) makes none\n") == 1
        assert page in out and ", fits in " not in out
