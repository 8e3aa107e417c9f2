"""Ranks that run different units, die or stop: what every rank is told, and that right runs are silent."""

import contextlib
import copy
import multiprocessing
import multiprocessing.util
import os
import resource
import select
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import count_collectives
from forks import run_forks
from fronts import assert_same_values, no_sync, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import Phase, ShardingStrategy, record_events, replicate
from fsdp_wrap._checks import order
from fsdp_wrap._comm import Note, positions_of
from fsdp_wrap._comm import works as _works
from fsdp_wrap._comm.positions import log_files
from fsdp_wrap._comm.watching import watch as _watch
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects
from params.fake_ranks import fake_ranks

DIFFERS = "^Forward order differs across ranks"
CHANGED = "Forward order differs from that of the first iteration"
MIXED_UP = "^ranks communicate for different units"


class Skips(nn.Linear):
    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.skips else super().forward(x)


@pytest.mark.parametrize(("front", "shared"), [("orig", "0"), ("composable", "1")])
@ranks(2)
def test_a_unit_that_has_no_gradient_on_one_rank_is_told(rank, world_size, front, shared, monkeypatch):
    """The rank that has none reduces nothing there; it is the last reduction of the backward."""
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", shared)
    layer = Skips(4, 4)
    model = shard(front, nn.Sequential(layer, nn.Linear(4, 4)), ModuleWrapPolicy({Skips}))
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    layer.skips = rank == 1
    with pytest.raises(RuntimeError, match=MIXED_UP):
        for _ in range(2):
            model(x).sum().backward()


class Ordered(nn.Module):
    """Units a, b, c, run in the order of `order`; those behind ":" run as heads of what came before."""

    def __init__(self, widths=(8, 8, 8), order="abc", kind="none") -> None:
        super().__init__()
        for name, width in zip("abc", widths):
            setattr(self, name, nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)))
        self.order = order
        self.kind = kind

    def forward(self, x):
        for name in self.order.partition(":")[0]:
            x = self._run(getattr(self, name), x).tanh()
        heads = [self._run(getattr(self, name), x) for name in self.order.partition(":")[2]]
        return (x, *heads) if heads else x

    def _run(self, unit, x):
        if self.kind == "none":
            return unit(x)
        return checkpoint(unit, x, use_reentrant=self.kind == "reentrant")


def wrapped(widths=(8, 8, 8), order="abc", kind="none", **kwargs):
    torch.manual_seed(0)
    model = Ordered(widths, order, kind)
    policy = ModuleWrapPolicy({nn.Sequential})
    return FSDP(model, auto_wrap_policy=policy, **{"use_orig_params": True, **kwargs})


def step(model, order=None, heads=None):
    """One forward and backward; `heads` chooses those outputs that the loss sees."""
    if order is not None:
        model.module.order = order
    output = model(torch.ones(2, 8, requires_grad=True))
    chosen = [output] if heads is None else [output[index] for index in heads]
    sum(one.square().sum() for one in chosen).backward()


@contextlib.contextmanager
def detail():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def comparisons():
    return mock.patch.object(order, "_compare_across_ranks", wraps=order._compare_across_ranks)


@contextlib.contextmanager
def collected_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
    texts += [str(one.message) for one in caught]


@contextlib.contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Forward order|ranks cannot|a collective")
        yield


@ranks(4)
def test_detail_finds_a_difference_between_any_ranks_before_the_gather(rank, world_size):
    """Also between replicas, which gather nothing together."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with detail():
        with record_events() as events, pytest.raises(RuntimeError, match=DIFFERS) as caught:
            step(model, "abc" if rank < 3 else "acb")
        expected = [f"rank {other} runs unit '{'b' if other < 3 else 'c'}'" for other in range(4)]
        assert ", ".join(expected) in str(caught.value)
        assert [event.unit for event in events if event.kind.value == "unshard"] == ["a"]
        with silence():  # the model can go on
            for _ in range(2):
                step(model, "abc")


@ranks(2)
def test_detail_warns_once_of_a_later_change(rank, world_size):
    """Also of units that are left out or added."""
    for first, later, said in (
        ("abc", ["acb", "cba", "abc"], "expected unit 'b', got unit 'c'"),
        ("abc", ["ab"], "expected unit 'c', got its end"),
        ("ab", ["abc"], "expected its end, got unit 'c'"),
    ):
        model = wrapped()
        with detail():
            with silence():
                for _ in range(3):
                    step(model, first)
            with collected_warnings() as texts:
                for order in later:
                    step(model, order)
        (text,) = texts
        assert text.startswith(CHANGED) and said in text


@ranks(2)
def test_what_detail_does_not_compare(rank, world_size):
    """Evaluations, recomputations, failed forwards; at other levels nothing."""
    x = torch.ones(2, 8)

    def look(model, order):
        model.eval()
        model.module.order = order
        model(x)
        with torch.no_grad():
            model(x)
            model.train()
            model(x)

    for kind in ("reentrant", "not", "none"):
        model = wrapped(kind=kind)
        with detail(), silence():
            with pytest.raises(TypeError):
                model(x, "too many")
            hook = model.module.b.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(model)
            hook.remove()
            counts = []
            for _ in range(3):
                with comparisons() as compare:
                    look(model, "cab")
                    step(model, "abc")
                counts.append(compare.call_count)
        assert counts == [3, 0, 0]
    model = wrapped(travel_together_bytes=0)
    with silence(), count_collectives() as traffic, comparisons() as compare:
        step(model, "abc")
        step(model, "cba")
    assert traffic["all_gather_into_tensor"].calls == 2 * (3 + 3) and not compare.called


@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 6, 9)], ids=["equal", "unequal"])
@ranks(2)
def test_mix_up_in_forward(rank, world_size, widths):
    model = wrapped(widths, travel_together_bytes=0)
    step(model, "abc")
    with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
        step(model, "abc" if rank == 0 else "acb")
    when = "(forward of iteration 2)"
    assert f"rank 0 gathers unit 'b' {when} while rank 1 gathers unit 'c' {when}" in str(caught.value)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_mix_up_in_backward(rank, world_size, strategy):
    model = wrapped(order="a:bc", sharding_strategy=ShardingStrategy[strategy])
    with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
        step(model, heads=[1 + rank])
    verb = "gathers" if strategy == "FULL_SHARD" else "reduces"
    for other, unit in enumerate("bc"):
        assert f"rank {other} {verb} unit '{unit}' (backward of iteration 1)" in str(caught.value)


class Spoils(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a bad batch")


class Fragile(nn.Module):
    """Two units and a head; `bad` says what the next batch spoils."""

    bad = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.second(self.first(x))
        if self.bad == "forward":
            raise ValueError("a bad batch")
        return Spoils.apply(self.head(x)) if self.bad == "backward" else self.head(x)


REPLICATED = ["flat", "orig", "hybrid", "replicate"]


class Skipping:
    """A replicated model beside a plain one; a step whose batch is bad is caught and left out."""

    def __init__(self, form: str) -> None:
        torch.manual_seed(0)
        self.plain = Fragile().double()
        self.inner = copy.deepcopy(self.plain)
        policy = ModuleWrapPolicy({nn.Sequential})
        options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD}
        if form == "hybrid":
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1))
            options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        if form == "replicate":
            for unit in (self.inner.first, self.inner.second):
                replicate(unit)
            self.model: nn.Module = replicate(self.inner)
        else:
            self.model = shard("orig" if form == "hybrid" else form, self.inner, policy, **options)
        self.optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (self.model, self.plain)]

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank))
        return model(x).square().mean()

    def try_step(self, step: int, bad: str = "", backward: bool = True, tries: int = 1) -> bool:
        """Runs forwards, all of which may be bad, and perhaps the backward of their mean loss."""
        self.inner.bad = bad
        try:
            losses = [self.loss(self.model, step, dist.get_rank()) for _ in range(tries)]
            if backward:
                (sum(losses) / tries).backward()
        except ValueError:
            return False
        finally:
            self.inner.bad = ""
        return True

    def step(self, step: int, **options: Any) -> None:
        """Trains both models."""
        assert self.try_step(step, **options)
        for rank in range(dist.get_world_size()):
            (self.loss(self.plain, step, rank) / dist.get_world_size()).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        assert_same_values(self.model, self.plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "shared"), [*zip(REPLICATED, "1010")])
@pytest.mark.parametrize("bad", ["forward", "backward", "backward, then no_sync"])
@ranks(2)
def test_a_step_that_raises_on_one_rank_alone_is_told(rank, world_size, form, shared, bad, monkeypatch):
    """Before gradients of two steps meet; the rank has sent none of that step, as all travel together."""
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", shared)
    training = Skipping(form)
    for step in range(3):
        training.step(step)
    with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
        if rank == 1:
            assert not training.try_step(3, bad.partition(",")[0])
            if "no_sync" in bad:
                with no_sync(training.model):
                    training.try_step(4)
        training.try_step(4 - (rank == 0))
    assert " or steps: rank 0 reduces the root unit" in str(caught.value)
    assert ", after a step that raised). " in str(caught.value) and "agree to skip the step" in str(
        caught.value
    )
    for param in training.model.parameters():
        param.grad = None
    training.check()


@pytest.mark.parametrize("form", REPLICATED)
@ranks(2)
def test_ranks_that_skip_a_step_together_go_on(rank, world_size, form):
    """Also ranks that evaluate differently often, with gradients or without, and unroll differently far."""
    training = Skipping(form)
    with silence():
        for step in range(6):
            for _ in range(rank):  # evaluations of rank 1
                training.loss(training.model, step, rank)
            training.step(step, tries=1 + rank)
            assert training.try_step(step, "forward" if rank == step % 2 else "", False) is (rank != step % 2)
            training.step(step + 10)
            if rank == 1:  # a bad micro-batch of an accumulation is not missed by the others
                with no_sync(training.model):
                    assert not training.try_step(step, ["forward", "backward"][step % 2])
    training.check()


def mix_up_replicas(rank: int, world_size: int) -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = wrapped(order="a:bc", device_mesh=mesh, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)
    with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
        step(model, heads=[1 + rank // 2])
    return str(caught.value)


def test_mix_up_between_replicas():
    """In processes of its own, since a group whose collective is stuck goes with its time limit only."""
    for rank, end in enumerate(run_forks(mix_up_replicas, [()], world_size=4)[0]):
        assert f"rank {rank % 2} reduces unit 'b'" in end.value
        assert f"rank {rank % 2 + 2} reduces unit 'c'" in end.value


@ranks(2)
def test_mix_up_of_two_roots_of_one_kind(rank, world_size):
    twins = [wrapped(), wrapped()]
    for model in twins:
        step(model)
    with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
        step(twins[rank])
    assert "rank 1 gathers unit 'a' of root number 2" in str(caught.value)


@ranks(2)
def test_mix_up_with_a_collective_of_no_unit(rank, world_size):
    """The other rank's numbers stay behind, while the two collectives match."""
    # Where they would not match; nor do they at once.
    os.environ.update(FSDP_WRAP_SHARED_MEMORY="0", FSDP_WRAP_GLOO="plain")
    model = wrapped(travel_together_bytes=0)
    step(model)
    shard = 2 * (64 + 8) // 2
    if rank == 1:
        dist.all_gather_into_tensor(torch.empty(2 * shard), torch.ones(shard))
    else:
        with pytest.raises(RuntimeError, match=MIXED_UP) as caught:
            step(model)
        assert "rank 0 gathers unit 'a'" in str(caught.value)
        assert "rank 1 has communicated for no unit" in str(caught.value)


def train_variously(make):
    """Accumulates, evaluates, summons, and lets several roots take turns."""
    models = [make(), make()]
    for iteration in range(12):  # more collectives than a ring holds
        for model in models:
            with model.no_sync() if iteration % 3 == 0 else contextlib.nullcontext():
                step(model)
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 8))
            model.train()
        with FSDP.summon_full_params(models[iteration % 2]):
            pass
        models[0].clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("FULL_SHARD", "not"), ("SHARD_GRAD_OP", "reentrant"), ("NO_SHARD", "none")]
)
@ranks(2)
def test_right_runs_are_silent(rank, world_size, strategy, kind):
    with silence():
        train_variously(lambda: wrapped(kind=kind, sharding_strategy=ShardingStrategy[strategy]))
    dist.barrier()
    table = positions_of(dist.group.WORLD).table()
    for other in range(2):
        state = "this one" if other == rank else "alive"
        assert f"rank {other} ({state}): in or after unit 'c' (forward of iteration 24)" in table
    assert "not begun" not in table


@pytest.mark.parametrize("lacking", ["place", "room"])
@ranks(2)
def test_training_goes_on_where_there_is_no_place_for_files(rank, world_size, tmp_path, lacking):
    """Also where there is too little room: a file cut short, as on a full file system, does not count."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack, collected_warnings() as texts:
        if lacking == "room":
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        else:
            stack.enter_context(mock.patch.object(log_files, "_directory", lambda: tmp_path / "none"))
        model = wrapped()
        if lacking == "place":
            step(wrapped(process_group=dist.new_group()))
    said = "ranks cannot show each other where they stand"
    assert len(texts) == 1 and said + " (cannot write" * (lacking == "room") in texts[0]
    with silence():
        for _ in range(12):
            step(model)


def hold_a_file(how: str, folder: str, store: str, link) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    with mock.patch.object(log_files, "_directory", lambda: Path(folder)):
        positions_of(dist.group.WORLD)
    link.send("held")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    link.recv()


@ranks(1, backend=None)
def test_files_go_with_their_process(rank, world_size, tmp_path):
    """Files of killed ranks are removed by a later job."""
    folder = tmp_path / "positions"
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    links, children = {}, {}
    for how in ("killed", "living"):
        links[how], far_end = context.Pipe()
        arguments = (how, str(folder), str(tmp_path / how), far_end)
        children[how] = context.Process(target=hold_a_file, args=arguments)
        children[how].start()
        assert links[how].recv() == "held"
    children["killed"].join()
    log_files._remove_left_overs(folder)
    assert len(os.listdir(folder)) == 2, "somebody may still want it"
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    log_files._remove_left_overs(folder)
    assert len(os.listdir(folder)) == 1
    links["living"].send("end")
    children["living"].join()
    assert os.listdir(folder) == []


def test_a_peer_has_come_if_it_had_before_the_comparison():
    """What it issues later may be something else, which nobody has compared."""
    with fake_ranks(0, 2):
        group = positions_of(dist.group.WORLD)
        group.log.words[1] = 1  # as if it were on this host
        group.log.search()
        group.issue(Note("gathers a unit"), Phase.FORWARD, 1)
        own = group.log.row_of(1) * 2
        assert not group.reached(1)

        def comes_late(number: int) -> None:
            group.log.words[own + 1] = group.log.words[own]

        with mock.patch.object(group, "compare", comes_late):
            assert not group.reached(1)
        assert group.reached(1)


def test_a_log_has_all_its_memory_at_once(tmp_path):
    """Lack of memory must raise where it is allocated: a page missing at a write kills the process."""
    with mock.patch.object(os, "posix_fallocate", wraps=os.posix_fallocate) as taken:
        log = log_files.open_log(tmp_path / "log", 1, 3)
    spans = [(call.args[1], call.args[1] + call.args[2]) for call in taken.call_args_list]
    own = log.entries_of(1, 3), log.entries_of(2, 3)
    assert log.words.nbytes == log.entries_of(0, 3)
    for first, last in ((0, log.words.nbytes), own, (log.nbytes(3) - 1, log.nbytes(3))):
        assert any(begin <= first and last <= end for begin, end in spans), (first, last, spans)


def end_one_by_one(rank: int, world_size: int, folder: Path, how: str) -> None:
    with mock.patch.object(log_files, "_directory", lambda: folder):
        step(wrapped())
        step(wrapped(process_group=dist.new_group([0, 1, 2])))
    pids = gather_objects(os.getpid())
    if rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for later in pids[rank + 1 :]:
        select.select([os.pidfd_open(later)], [], [])  # until it has ended
    multiprocessing.util._exit_function()
    os._exit(len(os.listdir(folder)))


def test_files_stay_until_all_ranks_have_ended(tmp_path):
    """So the others find the file of a dead rank; it is removed when they end."""
    ways = {"killed": -signal.SIGKILL, "ended": 2}
    cases = [(tmp_path, how) for how in ways]
    for last, ends in zip(ways.values(), run_forks(end_one_by_one, cases, world_size=3)):
        assert [end.exitcode for end in ends] == [0, 2, last]
    assert os.listdir(tmp_path) == []


class Clock:
    """Time that passes only while a work that never completes is waited for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.limits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        milliseconds = int(limit.total_seconds() * 1000)  # as c10d rounds; none would be no limit
        assert milliseconds > 0 and self.now < 10_000
        self.limits.append(milliseconds / 1000)
        self.now += self.limits[-1]
        raise RuntimeError("Operation timed out!")


@pytest.mark.parametrize(
    ("limit", "warns_at", "ends_at"), [(0.2, 0.25, 0.25), (10, 2.5, 8), (61.7, 16, 49.36), (1800, 301, 1770)]
)
def test_looks_during_a_wait(limit, warns_at, ends_at):
    clock = Clock()
    group = mock.Mock(issued=0, options=mock.Mock(_timeout=timedelta(seconds=limit)))  # and its positions
    group._get_backend.return_value, group.dead_before.return_value = group, []
    group.table.return_value, group.absent_from.return_value = "the table", [3]
    timed = (mock.patch.object(module, "time", clock) for module in (_watch, _works))
    with collected_warnings() as texts, next(timed), next(timed):
        pending = _works.Works(_watch.Watch(group, torch.device("cpu"), group), [clock])
        with pytest.raises(RuntimeError, match="the table") as caught:
            pending.wait()
    assert max(clock.limits) <= 1.0
    assert ends_at <= clock.now - 100 <= ends_at + 0.02
    assert f"has not completed: rank 3 did not come; the group's time limit is {limit:.1f} s" in str(
        caught.value
    )
    if ends_at > warns_at:
        (text,) = texts
        assert abs(float(text.split()[3]) - warns_at) <= 1


class Late:
    """A work that ends between the end of a limited wait for it and the question whether it has."""

    def __init__(self, fails: bool = True) -> None:
        self.fails = fails

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return True


def works(*pending: Any) -> _works.Works:
    positions = positions_of(dist.group.WORLD)
    return _works.Works(_watch.Watch(dist.group.WORLD, torch.device("cpu"), positions), [*pending])


@ranks(1)
def test_a_work_that_ends_just_after_the_wait_for_it(rank, world_size):
    """It has arrived, or has failed and is not waited for again: the first error stays."""
    works(Late(fails=False)).wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        works(Late()).wait()
    pending = works(Late())
    with mock.patch.object(pending._watch.positions, "compare_all", side_effect=RuntimeError("other units")):
        with pytest.raises(RuntimeError, match="other units"):
            pending.wait()
    with mock.patch.object(pending, "_wait_for", side_effect=AssertionError):
        with pytest.raises(RuntimeError, match="other units"):
            pending.wait()
