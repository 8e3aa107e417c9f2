"""Exports to a server that speaks S3's protocol, and imports, with its errors, time-outs and slow answers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import run_isolated
from buckets import impatient, objects_in
from fsdp_wrap import fully_shard
from fsdp_wrap.checkpoint import export_safetensors, import_safetensors
from fsdp_wrap.checkpoint._places import remote
from s3_server import Server, serving
from state_nets import assert_equal

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("FSDP_WRAP_SOAK_SAVES", "12"))
URL = "s3://bucket/weights/net"
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8)
INDEX = "model.safetensors.index.json"
OF_FILES = 4
"""Files of an export, and layers of a net: of each layer one file has all."""


@pytest.fixture
def server() -> Iterator[Server]:
    with impatient(), mock.patch.object(remote, "_WAITS", WAITS), serving("bucket") as started:
        yield started


def net(seed: int, sharded: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(OF_FILES)))
    if sharded:
        for layer in model:
            fully_shard(layer)
    return model


def exported(server: Server, model: nn.Module, config: Path | None = None) -> list[str]:
    files = [] if config is None else [config]
    return export_safetensors(model, server.path(URL), max_shard_size="1100", files=files)


def loaded(server: Server) -> dict[str, torch.Tensor]:
    model = net(99)
    assert import_safetensors(model, server.path(URL), budget="1KB") == ([], [])
    return model.state_dict()


def objects(server: Server) -> list[str]:
    return objects_in(str(server.path(URL)))


def test_faults_of_a_server_do_not_fail_exports_and_imports(server, tmp_path):
    """Errors, time-outs and slow answers at random: what is loaded is what was written."""
    choice, config = random.Random(11), tmp_path / "config.json"
    for seed in range(ROUNDS):
        config.write_text(f'{{"seed": {seed}}}')
        faults = [
            {
                "kind": kind,
                "of": choice.choice(["PUT", "GET", "HEAD", "DELETE", ".safetensors", "index"]),
                "after": choice.randrange(9),
            }
            for kind in choice.choices(["error", "hang", "slow"], [6, 1, 3], k=4)
        ]
        server.order(*faults)
        model = net(seed)
        files = exported(server, model, config)
        assert len(files) == OF_FILES
        server.order(*faults)
        assert_equal(loaded(server), model.state_dict())
        server.order()
        assert objects(server) == sorted([*files, "config.json", INDEX])
        assert (server.path(URL) / "config.json").read_bytes() == config.read_bytes()


def test_a_server_that_fails_for_good_is_told_and_leaves_the_earlier_export(server):
    before = exported(server, net(1))
    for of in ("PUT %.safetensors", f"PUT %{INDEX}"):
        server.order({"kind": "error", "of": of, "times": 1000})
        with pytest.raises(
            RuntimeError, match=f"export_safetensors.. failed on the first rank: OSError: {URL}/model"
        ):
            exported(server, net(2))
        server.order()
        assert objects(server) == sorted([*before, INDEX])
    assert_equal(loaded(server), net(1).state_dict())
    server.order({"kind": "error", "of": f"GET %{before[2]}", "times": 1000})
    with pytest.raises(OSError, match=f"{URL}/{before[2]}"):
        loaded(server)


@pytest.mark.parametrize("part", [1, 2, 5])
def test_a_part_of_a_large_file_is_sent_again(part, server):
    """The first part is sent in a new upload, others in the same one; the ranks gather only once."""
    model = nn.Linear(2048, 4200, bias=False)  # of 33 MiB, so that the last part is small
    server.log()
    server.order({"kind": "error", "of": f"partNumber={part}", "times": 3})  # more than the client tries
    export_safetensors(model, server.path(URL))
    asked = server.log()
    assert sum("partNumber=" in line for line in asked) == 5 + 3
    assert sum("POST" in line and line.endswith("uploads") for line in asked) == (2 if part == 1 else 1)
    assert not server.path(URL)._opened()[0].list_multipart_uploads("bucket"), "what failed was given up"
    again = nn.Linear(2048, 4200, bias=False)
    server.log()
    import_safetensors(again, server.path(URL))
    assert torch.equal(again.weight, model.weight)
    assert sum("GET" in line and line.endswith("model.safetensors") for line in server.log()) <= 4


def test_a_part_that_fails_for_good_fails_the_export(server):
    before = exported(server, net(1))
    server.order({"kind": "error", "of": "partNumber=2", "times": 1000})
    with pytest.raises(RuntimeError, match=f"failed on the first rank: PartNotSent: {URL}/model.safetensors"):
        export_safetensors(nn.Linear(2048, 4096, bias=False), server.path(URL))
    server.order()
    assert objects(server) == sorted([*before, INDEX])
    assert not server.path(URL)._opened()[0].list_multipart_uploads("bucket")


def dying_export(rank: int, world_size: int, url: str, phase: str, config: str) -> None:
    server = Server(int(url.rpartition(":")[2]))
    with impatient():
        exported(server, net(1, sharded=True), Path(config))
        if rank == 0:
            server.order({"kind": "kill", "of": phase})
        dist.barrier()
        exported(server, net(2, sharded=True), Path(config))


PHASES = {
    "PUT %/model-00001-of": 1,
    "PUT %/model-00004-of": 1,
    "GET %/model-00002-of": 1,  # as it is read back
    "GET %/model-00003-of": 1,
    "PUT %/config.json": 1,
    f"PUT %/{INDEX}": 2,
    "DELETE %/model.safetensors": 2,
    "DELETE %/model-0000": 2,
}
"""The request after which its rank is killed, before the answer; which export is there then."""


@pytest.mark.left_over(4)
@pytest.mark.parametrize("phase, there", PHASES.items())
def test_a_rank_that_is_killed_in_any_phase_leaves_one_whole_export(phase, there, server, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    outcomes = run_isolated(dying_export, server.url, phase, str(config), world_size=2)
    assert sorted(outcome.kind for outcome in outcomes) == ["died", "failed"], outcomes
    server.order()
    assert_equal(loaded(server), net(there).state_dict())
    files = exported(server, net(3), config)
    assert objects(server) == sorted([*files, "config.json", INDEX])
    assert_equal(loaded(server), net(3).state_dict())


def dying_import(rank: int, world_size: int, url: str, phase: str) -> dict[str, torch.Tensor]:
    server = Server(int(url.rpartition(":")[2]))
    model = net(5, sharded=True)
    with impatient():
        if rank == 0:
            server.order({"kind": "kill", "of": phase})
        dist.barrier()
        import_safetensors(model, server.path(URL))
    return {name: value.to_local() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("phase", ["GET %index", "GET %/model-00001-of", "GET %/model-00004-of"])
def test_a_rank_that_is_killed_while_it_reads_does_not_keep_others_from_reading(phase, server):
    exported(server, net(1))
    before = objects(server)
    outcomes = run_isolated(dying_import, server.url, phase, world_size=2)
    died = [outcome.kind for outcome in outcomes].index("died")
    server.order()
    other = outcomes[1 - died]
    assert other.kind == "passed", other
    for name, value in net(1).state_dict().items():
        assert torch.equal(other.value[name], value.chunk(2)[1 - died]), name
    assert objects(server) == before
    assert_equal(loaded(server), net(1).state_dict())
