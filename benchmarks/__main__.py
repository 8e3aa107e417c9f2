"""Asks all questions and writes the page of results.

python -m benchmarks [--only step,memory] [--cases gpt,lora] [--out DIR]
python -m benchmarks --render    writes page and pictures anew from the figures that were kept
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Question, Settings, answer, preload
from benchmarks.page import write_page

SCRIPTS = (
    "step",
    "floor",
    "host",
    "construction",
    "memory",
    "in_backward",
    "host_step",
    "wire",
    "update",
    "muon",
    "checkpoint",
    "async_save",
    "planning",
    "scaling",
    "collectives",
    "latency",
    "travel",
    "accumulation",
    "counts",
    "compression",
    "weights",
    "small_states",
    "recording",
    "uneven",
    "gpu",
)
DOCS = Path(__file__).resolve().parents[1] / "docs"


def questions() -> list[Question]:
    """Returns the questions of all scripts that are there."""
    names = (f"benchmarks.{name}" for name in SCRIPTS)
    modules = (importlib.import_module(name) for name in names if importlib.util.find_spec(name))
    return [module.QUESTION for module in modules]


def run(asked: list[Question], folder: Path, settings: Settings) -> Path:
    """Asks, and writes the page anew after each answer; what was answered before stays on it."""
    kept = folder / "performance" / "figures.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    page = write_page(folder, questions(), answers)
    for question in asked:
        print(f"\n## {question.title}", flush=True)
        before = answers.get(question.name) if settings.cases else None
        answers[question.name] = _beside(before, answer(question, settings))
        kept.write_text(json.dumps(answers, indent=1) + "\n")
        page = write_page(folder, questions(), answers)
    return page


def _beside(before: dict[str, Any] | None, anew: dict[str, Any]) -> dict[str, Any]:
    """Puts tables beside those that were not asked for anew, and tells of them when they were measured."""
    if before is None:
        return anew
    when = {key: value for key, value in anew.items() if key != "figures"}
    later = {**before.get("later", {}), **dict.fromkeys(anew["figures"], when)}
    return {**before, "figures": {**before["figures"], **anew["figures"]}, "later": later}


def main() -> None:
    known = {question.name: question for question in questions()}
    parser = argparse.ArgumentParser(description="Measures fsdp_wrap against its competitors.")
    parser.add_argument("--only", default=",".join(known), metavar="A,B", help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="where performance.md goes")
    parser.add_argument("--cases", default="", metavar="A,B", help="tables to measure anew, by their titles")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the page anew")
    options = parser.parse_args()
    if options.render:
        print(run([], options.out, Settings()))
        return
    settings = Settings(cases=tuple(filter(None, options.cases.split(","))))
    if unknown := [name for name in options.only.split(",") if name not in known]:
        parser.error(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
    asked = [known[name] for name in options.only.split(",")]
    try:
        for question in asked:
            question.check(settings)
    except ValueError as error:
        parser.error(str(error))
    if importlib.util.find_spec("matplotlib") is None:
        print("without matplotlib (pip install -e '.[benchmarks]') there will be tables, but no pictures")
    preload()
    started = time.monotonic()
    page = run(asked, options.out, settings)
    print(f"\n{page} after {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
