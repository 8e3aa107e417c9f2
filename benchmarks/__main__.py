"""Asks all questions and writes the page of results.

python -m benchmarks [--only step,memory] [--out DIR]
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
    "host",
    "memory",
    "wire",
    "update",
    "checkpoint",
    "scaling",
    "collectives",
    "latency",
    "travel",
    "compression",
    "gpu",
)
DOCS = Path(__file__).resolve().parents[1] / "docs"


def questions() -> list[Question]:
    """The questions of all scripts that are there."""
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
        answers[question.name] = answer(question, settings)
        kept.write_text(json.dumps(answers, indent=1) + "\n")
        page = write_page(folder, questions(), answers)
    return page


def main() -> None:
    known = {question.name: question for question in questions()}
    parser = argparse.ArgumentParser(description="Measures fsdp_wrap against its competitors.")
    parser.add_argument("--only", default=",".join(known), metavar="A,B", help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="where performance.md goes")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in known]:
        parser.error(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("without matplotlib (pip install -e '.[benchmarks]') there will be tables, but no pictures")
    preload()
    started = time.monotonic()
    page = run([known[name] for name in options.only.split(",")], options.out, Settings())
    print(f"\n{page} after {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
