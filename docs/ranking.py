"""A hook of mkdocs: how-to pages come first in the search, then start pages, then the reference."""

from __future__ import annotations

from typing import Any

BOOSTS = {
    "how-to": 2.0,
    "start": 1.5,
    "architecture": 0.4,
    "messages": 1.2,
    "api": 0.4,
    "changelog": 0.3,
    "testing": 0.4,
    "performance": 0.5,
}
"""Factors for a page's score in the search, by the beginning of its path; 1 for all others."""


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Sets the boost of a page; its text stays as it is."""
    for begin, boost in BOOSTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": boost}
    return markdown
