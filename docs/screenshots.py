"""Looks at the built site in a browser: takes pictures, tries the search, follows every internal link.

    mkdocs build --strict && python docs/screenshots.py --out /tmp/pictures

It needs Playwright for Python (`pip install playwright`) and a Chromium, which `--chromium` names. Pictures
are of the start page, a how-to and a page of the reference, at the widths of a phone and of a desktop, light
and dark. It ends with 1, and says why, if a link leads nowhere, a picture is missing, a page is wider than
the screen, something is asked of another host, or the search does not find what is there.
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

PAGES = ("index.html", "how-to/lora.html", "reference/wrapper.html")
WIDTHS = {"phone": (390, 844), "desktop": (1280, 800)}
SCHEMES = ("light", "dark")
WANTED = "step_in_backward"
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
    found = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    broken, count = [], 0
    for path, page in found.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.is_file()
            lost = target in found and parts.fragment and unquote(parts.fragment) not in found[target].places
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
                if page.evaluate("[...document.images].some(image => !image.naturalWidth)"):
                    faults.append(f"{where} lacks a picture")
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
    found = page.inner_text(".md-search-result__list")
    return [] if WANTED in found else [f"the search for {WANTED} finds other things"]


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
