"""What does not fit for the temporaries of an optimizer: it would fit, were that one fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_wrap._core import format_bytes
from fsdp_wrap.tools import Plan, fit, plan, preset, tune
from fsdp_wrap.tools.command import main
from fsdp_wrap.tools.planning.planner import fused_plan

FRONTS = pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
WIDTH, DEPTH, RANKS = 64, 24, 4

FILE = f"""
import torch
from torch import nn
from fsdp_wrap.tools import shard_as


def setup(*, front="fully_shard", rows=1, fused=False, device="cuda", make=torch.optim.AdamW):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({DEPTH})))
    model = shard_as(model, nn.Linear, front_end=front)
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


def between(front: str) -> tuple[Plan, Plan, int]:
    """Returns plans without and with fused kernels, and a limit between their needs."""
    plain, fused = planned(front=front), planned(front=front, fused=True)
    assert fused.needed_bytes < 0.9 * plain.needed_bytes
    return plain, fused, (plain.needed_bytes + fused.needed_bytes) // 2


@FRONTS
def test_a_plan_knows_what_fused_optimizers_would_need(front):
    plain, fused, limit = between(front)
    assert plain.peak_at.phase == "optimizer" and plain.unfused == ("AdamW",) and fused.unfused == ()
    found = fused_plan(partial(setup, front=front), plain, limit)
    assert found is not None and found.needed_bytes == fused.needed_bytes
    assert found.peak_by_kind == fused.peak_by_kind
    assert fused_plan(partial(setup, front=front), plain, plain.needed_bytes) is None, "it fits"
    assert Plan.from_json(plain.to_json()) == plain


@FRONTS
def test_the_page_says_so_where_it_does_not_fit(front):
    plain, _, limit = between(front)
    told = "are temporaries: AdamW(fused=True) makes none"
    machine = replace(preset("h100"), device_memory=limit)
    page = str(plan(partial(setup, front=front), RANKS, device="cuda", machine=machine))
    assert f"of which {format_bytes(plain.peak_by_kind['optimizer temporaries'])} {told}" in page
    machine = replace(machine, device_memory=plain.needed_bytes)
    assert told not in str(plan(partial(setup, front=front), RANKS, device="cuda", machine=machine))


def test_what_would_not_help_is_not_proposed():
    decays = partial(torch.optim.RMSprop, momentum=0.9)
    for options in ({"make": decays}, {"rows": 1 << 16}, {"fused": True}):
        found = planned(**options)
        assert fused_plan(partial(setup, **options), found, 1) is None, options
        assert ("optimizer" == found.peak_at.phase) == ("make" in options)
        assert found.unfused == (("AdamW",) if "rows" in options else ())


def test_optimizers_that_refuse_are_not_proposed():
    class Refuses(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["fused"]:
                raise RuntimeError("fused kernels do not take these")
            return super().step(closure)

    found = planned(make=Refuses)
    assert found.peak_at.phase == "optimizer" and found.unfused == ("Refuses",)
    assert fused_plan(partial(setup, make=Refuses), found, 1) is None


@pytest.mark.parametrize(
    ("make", "device"),
    [(torch.optim.SGD, "cuda"), (torch.optim.Adam, "cuda"), (torch.optim.Adagrad, "cpu")],
)
@FRONTS
def test_fused_kernels_are_planned(front, make, device):
    """Also those for which torch has no rule on tensors without values."""
    options = {"front": front, "make": make, "fused": True, "device": device}
    found = plan(partial(setup, **options), RANKS, device=device)
    assert "optimizer temporaries" not in found.peak_by_kind and found.unfused == ()


@FRONTS
def test_several_optimizers_are_fused_together(front):
    def several() -> Any:
        model, _, step = setup(front=front)
        halves = [*model.parameters()][::2], [*model.parameters()][1::2]
        optimizers = [torch.optim.AdamW(halves[0]), torch.optim.Adam(halves[1], foreach=True)]

        def both() -> None:
            step()
            for optimizer in optimizers:
                optimizer.step()
            for param in model.parameters():
                param.grad = None

        return model, optimizers, both

    found = plan(several, RANKS, device="cuda")
    assert found.unfused == ("AdamW", "Adam")


@FRONTS
def test_fit_plans_what_would_fit(front):
    plain, fused, limit = between(front)
    vary = {"front": [front], "rows": [1, 1 << 16]}
    found = fit(setup, RANKS, device_memory=limit, vary=vary, device="cuda")
    by_rows = {choice.values["rows"]: choice for choice in found.choices}
    first = by_rows[1]
    assert not first.fits and (first.fused, first.fused_bytes) == ("AdamW(fused=True)", fused.needed_bytes)
    assert by_rows[1 << 16].fused_bytes is None, "its peak is elsewhere"
    assert str(first).endswith(f"; {format_bytes(fused.needed_bytes)} with AdamW(fused=True)")
    assert "fused: the peak with AdamW(fused=True)" in str(found)
    assert f'"fused_bytes": {fused.needed_bytes}' in found.to_json()
    found = fit(setup, RANKS, device_memory=plain.needed_bytes, vary={"front": [front]}, device="cuda")
    assert "fused" not in str(found)


def test_tune_says_what_would_fit():
    _, fused, limit = between("fully_shard")
    machine = preset("h100", attained=0.5)

    def its_own() -> Any:
        return setup()

    words = r"It fits with AdamW\(fused=True\), which needs .* kB: take that, pass more memory"
    with pytest.raises(ValueError, match=words):
        tune(its_own, RANKS, device="cuda", memory=limit, machine=machine)
    with pytest.raises(ValueError, match="on 4 ranks.*It fits on 8 ranks: take those"):
        tune(its_own, RANKS, device="cuda", memory=fused.needed_bytes - 1, machine=machine)


def test_the_command_proposes_them(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    _, fused, limit = between("fully_shard")
    command = ["plan", f"{tmp_path}/mine.py:setup", "--device", "cuda", "--device-memory"]
    assert main([*command, f"{limit}B", "--ranks", "4"]) == 1
    out = capsys.readouterr().out
    assert "4 ranks: does not fit, " in out
    assert f"but 4 ranks with AdamW(fused=True): fits, {format_bytes(fused.needed_bytes)} of " in out
    assert "but 8 ranks" not in out and "nor does it" not in out
    assert main([*command, f"{fused.needed_bytes - 1}B", "--ranks", "4"]) == 1
    out = capsys.readouterr().out
    assert "but 4 ranks with AdamW(fused=True): does not fit, " in out and "but 8 ranks: fits, " in out
