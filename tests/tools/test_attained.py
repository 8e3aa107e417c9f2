"""Times of machines by data sheet: a range, unless one says what programs reach."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_wrap import FullyShardedDataParallel
from fsdp_wrap.tools import PRESETS, Machine, Plan, Recipe, fit, plan, preset, step_of
from fsdp_wrap.tools.command import main
from fsdp_wrap.wrap import ModuleWrapPolicy

H100 = preset("h100")
FRONTS = pytest.mark.parametrize("front", ["fully_shard", "wrapper"])


def setup(*, front: str = "fully_shard", batch: int = 8, device: str = "cuda") -> Any:
    model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    if front == "wrapper":
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0, use_orig_params=True
        )
    else:
        model = Recipe().apply(model, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.ones(batch * 512, 1024, device=device)
    return model, optimizer, step_of(model, optimizer, lambda: model(x).sum())


def planned(machine: Machine, **options: Any) -> Plan:
    return plan(partial(setup, **options), 2, device="cuda", machine=machine)


def seconds(made: Plan) -> float:
    assert made.predicted_seconds is not None
    return made.predicted_seconds


@FRONTS
def test_a_preset_predicts_from_the_usual_least_to_the_usual_most(front):
    least, most = H100.attained or (0.0, 0.0)
    assert 0 < least < most < 1
    made = planned(H100, front=front)
    one_by_one = [
        seconds(planned(preset("h100", attained=part), front=front))
        for part in (most, (least + most) / 2, least)
    ]
    assert made.predicted_range == (one_by_one[0], one_by_one[2])
    assert made.predicted_seconds == one_by_one[1]
    assert one_by_one[0] < 0.9 * one_by_one[1] < 0.81 * one_by_one[2]
    assert Plan.from_json(made.to_json()) == made
    page = str(made)
    assert f"Predicted on {ASSUMED}\n  step " in page and "; in the middle:\n  step " in page
    assert max(map(len, page.splitlines())) <= 80


def test_what_is_said_or_measured_is_one_time():
    for machine in (preset("h100", attained=0.5), preset("h100", attained=1), replace(H100, attained=None)):
        made = planned(machine)
        assert made.predicted_range is None and machine.attained is None
        assert ASSUMED not in str(made) and "in the middle" not in str(made)
        assert Plan.from_json(made.to_json()) == made
    assert preset("h100", attained=1).flops == H100.flops
    assert seconds(planned(preset("h100", attained=1))) < planned(H100).predicted_range[0]


def test_machines_keep_their_range():
    for machine in PRESETS.values():
        assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
        assert machine.expected.flops["float32"] == pytest.approx(0.55 * machine.flops["float32"])
    old = H100.to_dict()
    del old["attained"]
    assert Machine.from_dict(old).attained is None, "as before there were ranges"
    for wrong in ((0.7, 0.4), (0.0, 0.5), (0.5, 1.5)):
        with pytest.raises(ValueError, match="attained must be two fractions of the peak"):
            replace(H100, attained=wrong)


ASSUMED = "H100 SXM, 55% of its peak (40% to 70%)"


def test_fit_says_what_it_assumes():
    report = fit(setup, 2, device_memory="4GB", vary={"batch": [16]}, device="cuda", machine=H100)
    (choice,) = report.choices
    assert choice.predicted_seconds == seconds(planned(H100, batch=16))
    assert ASSUMED in str(report)
    again = fit(setup, 2, device_memory="4GB", vary={"batch": [16]}, device="cuda", machine=H100.expected)
    assert ASSUMED not in str(again) and again.choices[0].predicted_seconds == choice.predicted_seconds


def test_the_command_says_which_it_is(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from fsdp_wrap.tools import Recipe\nimport torch\nfrom torch import nn\n"
        "def setup():\n"
        "    model = Recipe().apply(nn.Sequential(nn.Linear(512, 512)), nn.Linear)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    def step():\n"
        "        model(torch.ones(4096, 512, device='cuda')).sum().backward()\n"
        "    return model, optimizer, step\n"
    )
    (tmp_path / "h100.json").write_text(json.dumps(H100.to_dict()))
    command = ["plan", f"{tmp_path}/mine.py:setup", "--ranks", "2", "--json", "--device", "cuda", "--machine"]

    def told(*more: str) -> Any:
        assert main([*command, *more]) == 0
        return json.loads(capsys.readouterr().out)[0]

    by_name, by_file = told("h100"), told(f"{tmp_path}/h100.json")
    assert by_name["predicted_range"] == by_file["predicted_range"] is not None
    half = told("h100", "--attained", "0.55")
    assert half["predicted_range"] is None and half["predicted_seconds"] == by_name["predicted_seconds"]
