"""Steps on a server that speaks S3's protocol, with its errors, time-outs and slow answers."""

import os
import random
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from bed import run_isolated
from buckets import impatient, objects_in
from fronts import full_state
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint._places import remote
from fsdp_wrap.checkpoint._places.remote import RemotePath
from resuming import Counter, net, other, per_block_of, train, trained
from s3_server import Server, serving
from state_nets import adamw, assert_equal

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("FSDP_WRAP_SOAK_SAVES", "12"))
URL = "s3://bucket/runs/lm"
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8)
DATA = [".metadata", "__0_0.distcp", "manifest.json"]


@pytest.fixture
def server() -> Iterator[Server]:
    with impatient(), mock.patch.object(remote, "_WAITS", WAITS), serving("bucket") as started:
        yield started


def objects(place: RemotePath) -> list[str]:
    return objects_in(str(place))


def names_of(files: dict[int, list[str]]) -> list[str]:
    return sorted(f"step_{step:08d}/{file}" for step, its in files.items() for file in its)


def test_faults_of_a_server_do_not_fail_saves_and_loads(server):
    """Errors, time-outs and slow answers at random: nothing is lost, and what is loaded is what was saved."""
    place, choice = server.path(URL), random.Random(7)
    model, optimizer = trained(1)
    for step in range(1, ROUNDS + 1):
        train(model, optimizer, 0, 1, range(step, step + 1))
        faults = [
            {
                "kind": kind,
                "of": choice.choice(["PUT", "GET", "HEAD", "DELETE", ".distcp"]),
                "after": choice.randrange(9),
            }
            for kind in choice.choices(["error", "hang", "slow"], [6, 1, 3], k=4)
        ]
        server.order(*faults)
        save = choice.choice(
            [checkpoint.save, lambda *all, **more: checkpoint.async_save(*all, **more).result()]
        )
        folder = save(place, model, optimizer, {"data": Counter(step)}, step=step, keep_last=2)
        assert checkpoint.latest(place) == folder
        server.order(*faults)
        again, data = net(), Counter(0)
        assert checkpoint.load(place, again, adamw(again), {"data": data}).step == step == data.at
        assert_equal(again.state_dict(), model.state_dict())
    server.order()
    assert objects(place) == names_of({ROUNDS - 1: DATA, ROUNDS: DATA})


def test_a_server_that_fails_for_good_is_told_and_leaves_the_earlier_step(server):
    place = server.path(URL)
    checkpoint.save(place, net())
    for of in ("PUT /bucket/runs/lm/step", "PUT %/manifest.json"):
        server.order({"kind": "error", "of": of, "times": 1000})
        with pytest.raises((RuntimeError, OSError), match=f"{URL}/step_00000002.*"):
            checkpoint.save(place, net())
        server.order()
        assert objects(place) == names_of({1: DATA})
    server.order({"kind": "error", "of": ".distcp", "times": 1000})
    model = other(net())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(checkpoint.DamagedCheckpoint, match="__0_0.distcp cannot be read: s3://"):
        checkpoint.load(place, model)
    assert_equal(model.state_dict(), before)
    with pytest.raises(ValueError, match="s3://nowhere/run cannot be written to .*bucket"):
        checkpoint.save(server.path("s3://nowhere/run"), model)
    assert checkpoint.latest(server.path("s3://nowhere/run")) is None


def test_faults_of_a_server_do_not_keep_a_cache_from_being_filled(server, tmp_path):
    place = server.path(URL)
    model, optimizer = trained(1)
    checkpoint.save(place, model, optimizer)
    for of in (".distcp", ".metadata"):
        server.order(
            *({"kind": kind, "of": of, "after": after} for after, kind in enumerate(("error", "slow")))
        )
        again = net()
        checkpoint.load(place, again, adamw(again), cache=tmp_path / of)
        assert_equal(again.state_dict(), model.state_dict())
    server.order({"kind": "error", "of": ".distcp", "times": 1000})
    checkpoint.load(place, other(net()), cache=tmp_path / ".distcp")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="__0_0.distcp cannot be read: s3://"):
        checkpoint.load(place, other(net()), cache=tmp_path / "new")


def test_large_objects_are_sent_and_read_in_parts(server):
    place = server.path(URL)
    model = torch.nn.Linear(2048, 4096, bias=False)  # of 32 MiB
    server.log()
    server.order({"kind": "error", "of": "partNumber=2", "times": 16})  # more than a part is tried
    checkpoint.save(place, model)
    asked = server.log()
    assert (
        sum("partNumber=" in line for line in asked) > 8
        and sum("uploads" in line and "POST" in line for line in asked) > 1
    )
    assert not place._opened()[0].list_multipart_uploads("bucket"), "what failed was given up"
    again = torch.nn.Linear(2048, 4096, bias=False)
    server.log()
    checkpoint.load(place, again)
    assert torch.equal(again.weight, model.weight)
    assert 4 <= sum("GET" in line and ".distcp" in line for line in server.log()) <= 6, "each byte once"


def test_uploads_of_killed_processes_are_given_up_by_the_next_save(server):
    place = server.path(URL)
    files = place._opened()[0]
    keys = ["runs/lm/step_00000001.0001abcdef/__0_0.distcp", "runs/lm/mine", "runs/other/step_00000001"]
    for key in keys:
        files.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    checkpoint.save(place, net())
    assert sorted(upload["Key"] for upload in files.list_multipart_uploads("bucket")) == keys[1:]


def trained_there(rank: int, world_size: int, url: str, steps: range) -> dict[str, torch.Tensor]:
    place = Server(int(url.rpartition(":")[2])).path(URL)
    model = per_block_of(net(), use_orig_params=True)
    optimizer = adamw(model)
    with impatient():
        if checkpoint.latest(place) is not None:
            assert checkpoint.load(place, model, optimizer).step == steps.start
        train(model, optimizer, rank, world_size, steps)
        checkpoint.save(place, model, optimizer, step=steps.stop)
    return {name: value.clone() for name, value in full_state(model).items()}


def test_any_number_of_ranks_goes_on(server):
    for number, world_size in enumerate((2, 1, 3)):
        steps = range(number, number + 1)
        outcomes = run_isolated(trained_there, server.url, steps, world_size=world_size)
        assert [outcome.kind for outcome in outcomes] == ["passed"] * world_size, outcomes
    for name, value in trained(3)[0].state_dict().items():
        torch.testing.assert_close(outcomes[0].value[name], value)


def dying(rank: int, world_size: int, url: str, phase: str) -> None:
    server = Server(int(url.rpartition(":")[2]))
    place = server.path(URL)
    with impatient():
        checkpoint.save(place, per_block_of(net()), step=1)
        server.order({"kind": "kill", "of": phase})
        torch.distributed.barrier()
        checkpoint.save(place, per_block_of(net()), step=2)


PHASES = {
    "PUT /bucket/runs/lm/.saving": 1,
    "__0_0.distcp": 1,
    "__1_0.distcp": 1,
    ".metadata.tmp": 1,
    ".manifest.json.draft": 1,
    "PUT /bucket/runs/lm/step_00000002.%/manifest.json": 2,
}
"""The request after which its rank is killed, before the answer; which step is there then."""


@pytest.mark.left_over(4)
@pytest.mark.parametrize("phase, there", PHASES.items())
def test_a_rank_that_is_killed_in_any_phase_leaves_whole_steps(phase, there, server):
    outcomes = run_isolated(dying, server.url, phase, world_size=2)
    assert sorted(outcome.kind for outcome in outcomes) == ["died", "failed"], outcomes
    server.order()
    place, model = server.path(URL), net()
    assert checkpoint.load(place, model).step == there
    checkpoint.save(place, model, step=3)
    of_two = sorted([*DATA, "__1_0.distcp"])
    assert objects(place) == names_of({**dict.fromkeys(range(1, there + 1), of_two), 3: DATA})


def test_a_process_that_writes_in_the_background_reaches_the_store(server):
    """With this many tensors another process writes, which knows what this one has configured."""
    place = server.path(URL)
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.full((2,), float(number))) for number in range(1000)]
    )
    for step in (1, 2):  # the second time by the plan of the first
        with torch.no_grad():
            model[7].add_(step)
        pending = checkpoint.async_save(place, model, step=step)
        assert pending.result() == checkpoint.latest(place)
        again = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)])
        assert checkpoint.load(place, again).step == step
        assert_equal(again.state_dict(), model.state_dict())
