"""The wire of vLLM's weight transfer: what the example's class says over HTTP, and the bits that arrive.

The server here serves the routes that vLLM documents, and has two workers that take broadcasts over gloo.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from bed import ranks
from bed.paths import ROOT
from bed.patience import NEVER
from bed.ports import free_port
from fronts import full_state, shard
from fsdp_wrap import weight_source
from sent_weights import POLICY, net, step

sys.path.insert(0, str(ROOT / "examples"))

from lm.vllm_wire import GlooGroup, VLLMServer, VLLMTransfer

WORKERS = 2
INIT = {"master_address", "master_port", "rank_offset", "world_size"}
PACKING = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}


class Worker:
    """Takes weights as vLLM's workers do: the sizes of broadcasts follow from names, dtypes and shapes."""

    def __init__(self, number: int, info: dict[str, Any]) -> None:
        assert info.keys() == INIT | PACKING and info["packed"] is True
        rank = number + info["rank_offset"]
        self._buffer = info["packed_buffer_size_bytes"]
        self._group = GlooGroup(info["master_address"], info["master_port"], info["world_size"], rank, NEVER)
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, info: dict[str, Any]) -> None:
        assert info.keys() == {"names", "dtype_names", "shapes"}
        waiting: list[tuple[str, torch.dtype, list[int], int]] = []
        for name, dtype_name, shape in zip(*(info[key] for key in ("names", "dtype_names", "shapes"))):
            dtype = getattr(torch, dtype_name)
            waiting.append((name, dtype, shape, torch.Size(shape).numel() * dtype.itemsize))
            if sum(size for *_, size in waiting) > self._buffer:
                self._take(waiting)
        self._take(waiting)

    def _take(self, waiting: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        if waiting:
            packed = torch.empty(sum(size for *_, size in waiting), dtype=torch.uint8)
            self._group.broadcast(packed, 0)
            for (name, dtype, shape, _), part in zip(waiting, packed.split([size for *_, size in waiting])):
                self.weights[name] = part.clone().view(dtype).view(shape)
            waiting.clear()


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("localhost", 0), Handler)
        self.asked: list[str] = []
        self.workers: list[Worker] = []
        self.refuses = ""

    def on_workers(self, do: Any, *what: Any) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            for call in [pool.submit(do, worker, *what) for worker in range(WORKERS)]:
                call.result(NEVER)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"world_size": WORKERS} if self.path == "/get_world_size" else None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(data) if data else {}
        self.server.asked.append(" ".join([self.path, *filter(None, [body.get("weight_version")])]))
        if self.path == self.server.refuses:
            self._answer(None)
            return
        if self.path == "/init_weight_transfer_engine":
            workers = self.server.workers
            self.server.on_workers(lambda number: workers.append(Worker(number, body["init_info"])))
        elif self.path == "/update_weights":
            self.server.on_workers(lambda number: self.server.workers[number].update(body["update_info"]))
        self._answer({"message": "done"})

    def _answer(self, content: dict[str, Any] | None) -> None:
        self.send_response(500 if content is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(content or {"detail": "out of order"}).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@ranks(2)
def test_workers_have_the_bits_of_the_trainers(rank, world_size):
    """Twice, with a step between; a buffer that ends between tensors; names and dtype of the engine."""
    model = shard("composable", net(), POLICY)
    source = weight_source(model, lambda name: f"model.{name}", dtype=torch.bfloat16)
    with serving() as there:
        server = VLLMServer(f"http://localhost:{there.server_port}", NEVER) if rank == 0 else None
        join = partial(GlooGroup, timeout=NEVER)
        transfer = VLLMTransfer(source, server, ("localhost", free_port()), join, buffer=100)
        for version in ("1", "2"):
            if server is not None:
                server.pause()
            transfer.send(version)
            if server is not None:
                server.resume()
            expected = {f"model.{name}": value.bfloat16() for name, value in full_state(model).items()}
            assert len(there.workers) == (WORKERS if rank == 0 else 0)
            for worker in there.workers:
                assert [*worker.weights] == [*expected]
                assert all(torch.equal(worker.weights[name], value) for name, value in expected.items())
            step(model)
        if rank == 0:
            rounds = [
                ["/pause?mode=keep", "/start_weight_update", "/update_weights"]
                + [f"/finish_weight_update {version}", "/resume"]
                for version in (1, 2)
            ]
            assert there.asked == ["/init_weight_transfer_engine", *rounds[0], *rounds[1]]


@ranks(2)
def test_training_goes_on_when_the_server_refuses(rank, world_size):
    model = shard("composable", net(), POLICY)
    before = copy.deepcopy(full_state(model))
    with serving() as there:
        server = VLLMServer(f"http://localhost:{there.server_port}", NEVER) if rank == 0 else None

        class Unheard(GlooGroup):
            """Gives up once the server has answered."""

            def broadcast(self, tensor: torch.Tensor, src: int) -> None:
                transfer._aside.submit(int).result()  # comes after what is asked
                self._group._set_default_timeout(timedelta(milliseconds=100))
                super().broadcast(tensor, src)

        join = partial(Unheard, timeout=NEVER)
        transfer = VLLMTransfer(weight_source(model), server, ("localhost", free_port()), join, buffer=100)
        there.refuses = "/update_weights"
        if rank == 0:
            with pytest.raises(RuntimeError, match="/update_weights answers 500: .*out of order"):
                transfer.send()
            assert there.asked[-1] == "/update_weights"
        else:
            transfer.send()
        step(model)
        assert not torch.equal(full_state(model)["0.weight"], before["0.weight"])
    if rank == 0:
        with pytest.raises(RuntimeError, match="/resume cannot be reached"):
            server.resume()
