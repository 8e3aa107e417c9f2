"""An S3 server on the loopback, in a process of its own, with faults that a test orders.

Requests to `/-/faults` set a list of faults, and to `/-/log` return what has been asked since.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from fsdp_wrap.checkpoint._places.remote import RemotePath

CREDENTIALS = {"key": "a key", "secret": "a secret"}
TIMEOUT = 1.0  # seconds that a client waits for an answer


class Server:
    """A server, as tests see it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def path(self, url: str) -> RemotePath:
        """Returns a place there, of this process."""
        how: dict[str, Any] = {
            "read_timeout": TIMEOUT,
            "connect_timeout": TIMEOUT,
            "retries": {"max_attempts": 1},
        }
        how["user_agent_extra"] = f"process/{os.getpid()}"
        fsspec.config.conf["s3"] = {"endpoint_url": self.url, "config_kwargs": how, **CREDENTIALS}
        return RemotePath(url)

    def order(self, *faults: dict[str, Any]) -> None:
        """Orders faults, in place of those before.

        Each has a `kind` (error, hang, slow, kill), what the request's line contains (`of`, each part between
        %), how many such requests pass before (`after`), and how many are hit (`times`).
        """
        self._ask("faults", faults)

    def log(self) -> list[str]:
        """Returns the lines of all requests since the last look."""
        return list(self._ask("log", None))

    def _ask(self, what: str, content: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/-/{what}", json.dumps(content).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@contextmanager
def serving(bucket: str) -> Iterator[Server]:
    """Yields a server with an empty bucket."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        server = Server(int(process.stdout.readline()))
        request = urllib.request.Request(f"{server.url}/{bucket}", method="PUT")
        urllib.request.urlopen(request).close()
        yield server
    finally:
        process.kill()
        process.wait()


# in the process


class _Faulty:
    """An application that answers as another one does, but for what was ordered."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._faults: list[dict[str, Any]] = []
        self._log: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        path, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        if path.startswith("/-/"):
            return self._ordered(path, environ, start)
        line = f"{environ['REQUEST_METHOD']} {path}" + (f"?{query}" if query else "")
        self._log.append(line)
        kind = self._due(line)
        if kind == "error":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if kind == "hang":
            time.sleep(3 * TIMEOUT)
        answer = self._app(environ, start)
        if kind == "kill":  # the process that has asked, which tells its number; it does not get the answer
            os.kill(int(environ["HTTP_USER_AGENT"].rpartition("/")[2]), signal.SIGKILL)
            time.sleep(TIMEOUT)
        return _slowly(answer) if kind == "slow" else answer

    def _ordered(self, path: str, environ: dict[str, Any], start: Any) -> Any:
        content = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        answer: Any = None
        if path.endswith("faults"):
            self._faults = content
        else:
            answer, self._log = self._log, []
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def _due(self, line: str) -> str | None:
        for fault in self._faults:
            if all(part in line for part in fault["of"].split("%")) and fault.get("times", 1) > 0:
                if fault.get("after", 0) > 0:
                    fault["after"] -= 1
                else:
                    fault["times"] = fault.get("times", 1) - 1
                    return str(fault["kind"])
        return None


def _slowly(answer: Any) -> Iterator[bytes]:
    """Yields an answer in pieces, as over a bad connection."""
    data = b"".join(answer)
    step = max(1, len(data) // 5)
    for begin in range(0, len(data), step):
        time.sleep(TIMEOUT / 4)
        yield data[begin : begin + step]


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = _Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
