"""A hook of mkdocs: guides and the reference stand before other pages in the results of the search."""

from __future__ import annotations

from typing import Any

BOOSTS = {
    "architecture": 0.4,
    "messages": 0.7,
    "api": 0.4,
    "changelog": 0.3,
    "testing": 0.4,
    "performance": 0.5,
}
"""By how much the words of a page count, by the beginning of its path; all others by 1."""


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Sets the boost of a page; its text stays as it is."""
    for begin, boost in BOOSTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": boost}
    return markdown
