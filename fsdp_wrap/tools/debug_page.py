"""A page of torch's debug server (`torch.distributed.debug`): the unit of each rank, and its collectives.

Import it on all ranks before the server starts.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

from fsdp_wrap._comm import describe_here
from fsdp_wrap._core.torch_private import answer_debug_page, debug_page

__all__ = ["PositionsHandler"]

_NAME = "fsdp_wrap_positions"
_page = debug_page()


class PositionsHandler(_page.DebugHandler):  # type: ignore[name-defined,misc]
    """The page "FSDP units": for each rank its last unit and latest collectives, the newest first.

    On all ranks, with `jinja2`, `tabulate`, and `aiohttp` or `requests` installed:

        from torch.distributed.debug import start_debug_server
        from torch.distributed.debug._debug_handlers import default_handlers

        start_debug_server(handlers=[*default_handlers(), PositionsHandler()])
    """

    def routes(self) -> list[Any]:
        """Returns the path of the page."""
        return [_page.Route(f"/{_NAME}", self._show)]

    def nav_links(self) -> list[Any]:
        """Returns the link to it."""
        return [_page.NavLink(f"/{_NAME}", "FSDP units")]

    def dump(self) -> str:
        """Returns the page's text, which the server writes to its `dump_dir`."""
        return "\n".join(f"{address}\n{answer.text}" for address, answer in zip(*self._fetched()))

    def dump_filename(self) -> str:
        """Returns the name for `enabled_dumps` of the server."""
        return _NAME

    def _fetched(self) -> Any:
        """Returns the addresses of all ranks, and their answers."""
        limits = "timeout" in inspect.signature(_page.fetch_all).parameters  # torch 2.11 has no limit
        return _page.fetch_all(_NAME, **({"timeout": self.fetch_timeout} if limits else {}))

    def _show(self, request: Any) -> bytes:
        addresses, answers = self._fetched()
        page: bytes = request.frontend.render_template(
            "raw_resp.html", title="FSDP units", addrs=addresses, resps=answers
        )
        return page


def _answer(request: Any, response: Any) -> None:
    """Answers for this rank, in a thread of the server's."""
    response.set_content(describe_here(), "text/plain")
    response.set_status(200)


# Torch drops its last reference after Python has ended, which would end the process by a signal.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
answer_debug_page(_NAME, _answer)
