"""Steps and exports on a server that speaks Google Cloud Storage's protocol.

`pip install gcsfs gcp-storage-emulator`, which is no part of the test extra.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from buckets import impatient, objects_in
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import _command
from resuming import Counter, net, trained
from state_nets import adamw, assert_equal

pytest.importorskip("gcp_storage_emulator")
with mock.patch.dict(os.environ, {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}):  # read when it is imported
    pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

DATA = [".metadata", "__0_0.distcp", "manifest.json"]


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    import fsspec  # type: ignore[import-untyped]
    from gcp_storage_emulator.server import create_server  # type: ignore[import-not-found]

    from bed.ports import free_port

    port = free_port()
    started = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    how = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "p"}
    environment = {"STORAGE_EMULATOR_HOST": how["endpoint_url"]}
    started.start()
    try:
        with (
            mock.patch.dict(fsspec.config.conf, {"gs": how}),
            mock.patch.dict(os.environ, environment),
            impatient(),
        ):
            yield
    finally:
        started.stop()


def test_steps_are_saved_kept_and_loaded():
    place = "gs://bucket/runs/lm"
    assert checkpoint.latest(place) is None
    model, optimizer = trained(2)
    for step in (1, 2, 3):
        folder = checkpoint.save(place, model, optimizer, {"data": Counter(step)}, step=step, keep_last=2)
        assert checkpoint.latest(place) == folder
    assert objects_in(place) == sorted(f"step_0000000{step}/{file}" for step in (2, 3) for file in DATA)
    fresh, data = net(), Counter(0)
    assert checkpoint.load(place, fresh, adamw(fresh), {"data": data}).step == data.at == 3
    assert_equal(fresh.state_dict(), model.state_dict())
    assert checkpoint.async_save(place, model, optimizer, step=4).result() == checkpoint.latest(place)


def test_large_weights_go_there_and_back(tmp_path):
    place, model = "gs://bucket/weights/net", nn.Linear(2048, 4200, bias=False)
    checkpoint.save("gs://bucket/runs/large", model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        nn.init.normal_(model.weight)
        checkpoint.export_safetensors(model, place)
        again = nn.Linear(2048, 4200, bias=False)
        checkpoint.import_safetensors(again, place)
        assert torch.equal(again.weight, model.weight)
        assert objects_in(place) == ["model.safetensors"]


def test_commands_take_its_urls(tmp_path):
    model, optimizer = trained(1)
    checkpoint.save("gs://bucket/runs/lm", model, optimizer)
    assert _command.main(["inspect", "gs://bucket/runs/lm", "--verify"]) == 0
    assert _command.main(["export", "gs://bucket/runs/lm", str(tmp_path / "out")]) == 0
    fresh = net()
    checkpoint.import_safetensors(fresh, tmp_path / "out")
    assert_equal(fresh.state_dict(), model.state_dict())
