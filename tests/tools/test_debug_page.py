"""The page of torch's debug server, in this process, with answers of two ranks."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from urllib.request import Request, urlopen

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import _WorkerServer
from torch.distributed.debug import _frontend

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.tools.debug_page import PositionsHandler
from models import gather_objects


@ranks(2)
def test_every_rank_tells_its_unit_and_collectives(rank, world_size):
    worker = _WorkerServer("127.0.0.1", 0)
    address = f"http://127.0.0.1:{worker.port}/handler/fsdp_wrap_positions"

    def answer() -> str:
        with urlopen(Request(address, data=b"")) as response:
            return str(response.read().decode())

    assert answer() == "in no unit yet"
    model = FSDP(nn.Sequential(nn.Linear(3, 3), FSDP(nn.Linear(3, 3))))
    model(torch.ones(2, 3)).sum().backward()
    responses = gather_objects((address, _frontend.Response(200, answer())))
    handler = PositionsHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_frontend, "_IPv6HTTPServer", ThreadingHTTPServer)  # which not every host has
        patch.setattr(_frontend, "fetch_all", lambda endpoint, **limits: zip(*responses))
        server = _frontend.FrontendServer(0, [handler])
        port = server._server.server_address[1]
        with urlopen(f"http://127.0.0.1:{port}/fsdp_wrap_positions") as response:
            page = response.read().decode()
        server._server.shutdown()
        dump = handler.dump()
    for text in (page, dump):
        assert text.count("in or after ") == world_size
        for other, _ in responses:
            assert other in text
    assert ">FSDP units</a>" in page
    first, *latest = answer().splitlines()
    assert first.startswith("in or after ") and first.endswith("(backward of iteration 1)")
    assert f"number {len(latest)} of rank 0, rank 1: reduces " in latest[0] and "number 1 of " in latest[-1]
    assert handler.dump_filename() == "fsdp_wrap_positions"
    worker.shutdown()
