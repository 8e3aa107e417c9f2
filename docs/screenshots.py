"""Looks at the built site in a browser: takes pictures, tries the search, follows every internal link.

    mkdocs build --strict && python docs/screenshots.py --out /tmp/pictures

It needs Playwright for Python (`pip install playwright`) and a Chromium, which `--chromium` names. Pages are
the first ones, a how-to, a page of the reference, and all with pictures, at three widths, light and dark. It
ends with 1, and says why, if a link leads nowhere, a picture is missing, a page is wider than the screen, the
start page is longer than one, something is asked of another host, or the search does not find what is there:
a name, and errors as a user pastes them.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PAGES = (
    *("index.html", "start/install.html", "start/what-runs-where.html", "how-to/lora.html"),
    *("reference/wrapper.html", "architecture.html", "timeline.html", "performance.html"),
    *("differences.html", "messages.html"),
)
WIDTHS = {"phone": (390, 844), "tablet": (900, 900), "desktop": (1400, 900)}
FOOTER = 130
"""Pixels of a page below its text."""
SCHEMES = ("light", "dark")
SMALL = (
    "[...document.images].some(image => image.clientWidth && image.clientWidth < 0.8 * image.naturalWidth)"
)
"""Whether a picture that is shown is much smaller than it was drawn, with words of 12 pixels."""
WANTED = "step_in_backward"
ERRORS = {
    "NameWrapPolicy: no module has a class named 'Blok'; the classes present, with their counts, are: "
    "Linear (1), Sequential (1)": "namewrappolicy-no-module",
    "FullyShardedDataParallel needs a process group, and there is none: call torch.distributed."
    "init_process_group() before wrapping (torchrun sets what it reads)": "needs-a-process-group",
    "this Linear is already wrapped in FullyShardedDataParallel: wrap a module once": "is-already-wrapped-in",
    "this FSDPLinear is already wrapped, or part of a wrapped module; wrap parts before the whole, each "
    "once": "already-wrapped-or-part-of",
    "load_state_dict(assign=True) would replace sharded parameters; leave assign out": "load_state_dict",
    "no complete checkpoint in /data/runs: there is no such folder": "no-complete-checkpoint-in",
    "/data/runs/step_00000001 does not fit, and nothing was loaded: weight has shape (2, 2) there and (3, 3) "
    "here; bias has shape (2,) there and (3,) here": "does-not-fit-and-nothing-was-loaded",
    "Adafactor computes with whole parameters, of which a shard is a part: it cannot step on shards alone. "
    "Use an elementwise optimizer, such as AdamW; or for matrices fsdp_wrap.optim.Muon, or a function of "
    "your own with owned_matrices()": "computes-with-whole-parameters",
    "parameter 's' has no dimension: give it the shape (1,), or pass it in ignored_params": "no-dimension",
    "reshard_after_forward is a bool, an int or None, not 'yes'": "reshard_after_forward-is-a-bool",
    "plan() makes a process group of its own, and this process has one already: call plan() before "
    "torch.distributed.init_process_group() and not in setup(), or in another process": "plan-makes-a",
    "this AdamW was made before the model was sharded and holds the parameter 'blocks.0.weight' as it "
    "was then, which training no longer reaches (seen on rank 1): make it from model.parameters() after"
    " sharding, or wrap with FullyShardedDataParallel(..., use_orig_params=True), which keeps Parameter"
    " objects that are no DTensors": "was-made-before-the-model-was-sharded",
    "RuntimeError: Error(s) in loading state_dict for FullyShardedDataParallel (nothing was loaded): "
    'Unexpected key(s) in state_dict: "module.weight", "module.bias".': "errors-in-loading-state_dict",
    "ranks communicate for different units: rank 0 gathers unit 'blocks.1' (forward of iteration 1) "
    "while rank 1 gathers unit 'blocks.2' (forward of iteration 1). All ranks of a group must run the "
    "same units in the same order.": "ranks-communicate-for-different-units",
    "a collective issued 12.0 s ago has not completed; the group's time limit is 15.0 s": "s-ago-has-not",
    "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before "
    "calling distributed operators!": "got-mixed-torchtensor-and-dtensor",
    "nothing in Linear is wrapped or sharded: pass timeline() the model that FullyShardedDataParallel or "
    "fully_shard returned, or one around it": "is-wrapped-or-sharded-pass",
}
"""Errors of real mistakes, and what the place of the first entry that is found holds."""
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
)


class Page(HTMLParser):
    """What a built page links to, and the places in it that links may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.links += [told[name] for name in ("href", "src") if name in told]
        self.places |= {told[name] for name in ("id", "name") if name in told}


def broken_links(site: Path) -> tuple[list[str], int]:
    """The links within the site that lead nowhere, and how many were looked at."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    broken, count = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.is_file()
            lost = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].places
            if missing or (lost and parts.fragment != "__skip"):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken, count


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site on this machine; gives its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def look(browser: Any, address: str, out: Path) -> list[str]:
    """Takes the pictures; returns what is wrong with the pages."""
    faults: list[str] = []
    for scheme in SCHEMES:
        for width, (across, down) in WIDTHS.items():
            size = {"width": across, "height": down}
            context = browser.new_context(viewport=size, color_scheme=scheme)
            page = context.new_page()
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            for name in PAGES:
                page.goto(f"{address}/{name}", wait_until="networkidle")
                page.screenshot(path=out / f"{Path(name).stem}-{width}-{scheme}.png")
                where = f"{name} ({width}, {scheme})"
                if page.evaluate("document.documentElement.scrollWidth") > across:
                    faults.append(f"{where} is wider than the screen")
                if name == "index.html" and width == "desktop":
                    below = page.evaluate("document.documentElement.scrollHeight") - FOOTER - down
                    faults += [f"{where} is {below} pixels longer than the screen"] if below > 0 else []
                if page.evaluate("[...document.images].some(image => !image.naturalWidth)"):
                    faults.append(f"{where} lacks a picture")
                if width == "phone" and page.evaluate(SMALL):
                    faults.append(f"{where}: words in a picture are too small to be read")
            faults += [f"asks another host: {url}" for url in asked if not url.startswith((address, "data:"))]
            context.close()
    return faults


def search(browser: Any, address: str, out: Path) -> list[str]:
    """Types a name into the search; returns what is wrong with the answer."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{address}/index.html", wait_until="networkidle")
    page.click(".md-search__input")
    page.keyboard.type(WANTED)
    try:
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
    except Exception as error:
        return [f"the search for {WANTED} finds nothing: {error}"]
    page.wait_for_timeout(500)
    page.screenshot(path=out / "search.png")
    results = page.inner_text(".md-search-result__list")
    faults = [] if WANTED in results else [f"the search for {WANTED} finds other things"]
    for words, place in ERRORS.items():
        for pasted in ("", words):  # results of the error before must be gone
            page.fill(".md-search__input", "")
            page.keyboard.insert_text(pasted)
            page.keyboard.press("End")
            page.wait_for_timeout(1000)
        links = page.query_selector_all(".md-search-result__link")
        first = [link.get_attribute("href") or "" for link in links[:2]]  # the page, and its first section
        if not any(place in link.partition("#")[2] for link in first):
            faults.append(f"the search for '{words}' finds other things first: {first}")
    return faults


def main() -> int:
    """Looks at all of it."""
    parser = argparse.ArgumentParser(description="Looks at the built site in a browser.")
    parser.add_argument("--site", type=Path, default=Path("site"), help="what mkdocs has built")
    parser.add_argument("--out", type=Path, required=True, help="where the pictures go")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser's program")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    faults, count = broken_links(options.site.resolve())
    print(f"{count} links, {len(faults)} of them lead nowhere")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, served(options.site) as address:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS.split())
        faults += look(browser, address, options.out) + search(browser, address, options.out)
        browser.close()
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
