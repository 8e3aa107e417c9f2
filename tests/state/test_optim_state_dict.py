"""Optimizer state dicts against those of a plain optimizer of a plain module."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bed import ranks
from bed.memory import Peak, settled_bytes
from bed.references import count_collectives
from fronts import ONE, SIDE, assert_tensors, chosen, each_form, squares
from fsdp_wrap import (
    FullOptimStateDictConfig,
    IntervalTensor,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._state import sharded_optim_state_dict, small_states
from fsdp_wrap.distributed_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from optim_states import assert_same, by_name, grouped, resume
from params.fake_ranks import fake_ranks
from state_nets import (
    FULL,
    SHARDED,
    Net,
    Tied,
    adamw,
    assert_close,
    below_plain,
    by_hand,
    per_block,
    train_side_by_side,
    whole,
    wrapped_and_plain,
)

WAYS = [(whole, False), (per_block, True), (by_hand, False)]
"""Of wrapping, with a form of the wrapper."""


def test_where_the_blocks_of_a_distributed_tensor_lie():
    """As one interval of its elements, or not: blocks of low-bit optimizers cannot follow several cuts."""
    with fake_ranks(3, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        copied, cut, columns = Replicate(), Shard(0), Shard(1)
        for placements, shape, expected in (
            ((copied, copied), (7, 5), (0, 35)),
            ((copied, cut), (3, 5), (20, 35)),
            ((cut, copied), (3, 5), (20, 35)),
            ((cut, cut), (1, 5), None),
            ((columns, copied), (7, 2), None),
        ):
            strided: Any = {"shape": torch.Size((7, 5)), "stride": (5, 1)}
            param = DTensor.from_local(torch.zeros(shape), mesh, placements, run_check=False, **strided)
            original: Any = SimpleNamespace(source=nn.Parameter(param))
            assert small_states._bounds(original) == expected, placements


def _of(kind: Any, module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return kind(module.parameters(), lr=1e-2, **options)


sgd = partial(_of, torch.optim.SGD, momentum=0.9)
amsgrad = partial(_of, torch.optim.Adam, amsgrad=True)
nadam, adagrad, adafactor = (
    partial(_of, kind) for kind in (torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adafactor)
)


def trained(wrap: Any, use_orig_params: bool, make: Any = adamw, net: Any = Net, steps: int = 2) -> Any:
    model, plain = wrapped_and_plain(net, wrap, use_orig_params)
    ours, theirs = make(model), make(plain)
    train_side_by_side(steps, model, ours, plain, theirs)
    return model, ours, plain, theirs


@pytest.mark.parametrize(
    ("make", "net"), [(make, Net) for make in (adamw, sgd, amsgrad, nadam, adagrad)] + [(adamw, Tied)]
)
@ranks(3)
def test_full_state_goes_to_a_plain_optimizer_and_back(rank, world_size, make, net):
    for wrap, use_orig_params in WAYS:
        model, ours, plain, theirs = trained(wrap, use_orig_params, make, net)
        state, expected = FSDP.optim_state_dict(model, ours), by_name(theirs, plain)
        assert_same(state, expected)
        assert list(state["state"]) == [name for name, _ in plain.named_parameters()]
        numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, optim=theirs)
        fresh = make(plain)
        fresh.load_state_dict(numbered)
        assert_same(by_name(fresh, plain), expected, check_dtype=False)
        named = FSDP.rekey_optim_state_dict(
            fresh.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=fresh
        )
        assert_same(named, expected, check_dtype=False)  # torch has cast NAdam's products
        back = make(model)
        resume(model, back, named)
        assert_same(FSDP.optim_state_dict(model, back), expected, check_dtype=False)
        train_side_by_side(2, model, back, plain, fresh)
        assert_close(model.state_dict(), plain.state_dict())


@each_form
@ranks(2)
def test_a_group_without_parameters_has_the_options_that_it_had(rank, world_size, use_orig_params):
    def make(module: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [*module.parameters()]}, {"params": []}]
        return torch.optim.AdamW([{**group, "lr": lr * place} for place, group in enumerate(groups, 1)])

    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    expected, fresh = make(plain), make(plain, 1.0)
    fresh.load_state_dict(expected.state_dict())
    for way in ("one by one", "by torch's function"):
        ours = make(model, 1.0)
        if way == "one by one":
            ours.load_state_dict(
                FSDP.optim_state_dict_to_load(model, ours, FSDP.optim_state_dict(model, make(model)))
            )
        else:
            set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, make(model)))
        assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in fresh.param_groups]


@pytest.mark.parametrize(("rank0_only", "use_orig_params"), [(False, False), (True, True)])
@ranks(2)
def test_memory_of_full_state_is_the_result_or_one_gather(rank, world_size, rank0_only, use_orig_params):
    model = squares("orig" if use_orig_params else "flat", per_unit=1)
    optimizer = adamw(model)
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    keeps = not (rank0_only and rank)
    least, most = (2 * 4 * ONE, 2 * 4 * ONE) if keeps else (ONE / 2, ONE)  # of which one rank sends a half
    before = settled_bytes()
    with Peak(before + 1.05 * most) as peak:
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only)
    assert bool(state) == keeps
    values = [value for entry in state["state"].values() for value in entry.values()] if keeps else []
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in values)
    assert len({value.data_ptr() for value in values}) == len(values)
    assert 0.95 * least <= peak.value - before <= 1.05 * most


@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", False), ("NO_SHARD", True), ("HYBRID_SHARD", True)]
)
@ranks(4)
def test_the_first_rank_saves_and_gives_to_all(rank, world_size, strategy, use_orig_params):
    plain = Net().double()
    options = chosen("flat", strategy, world_size)
    model = per_block(copy.deepcopy(plain), use_orig_params=use_orig_params, **options)
    ours, theirs = adamw(model), adamw(plain)
    train_side_by_side(2, model, ours, plain, theirs)
    scattered, fresh = adamw(model), adamw(model)
    with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        state = FSDP.optim_state_dict(model, ours)
        assert (state == {}) == (rank != 0)
        if rank == 0:
            assert_same(state, by_name(theirs, plain))
        given = state if rank == 0 else None
        scattered.load_state_dict(FSDP.scatter_full_optim_state_dict(given, model, optim=scattered))
        resume(model, fresh, given)
    for loaded in (scattered, fresh):
        assert_same(FSDP.optim_state_dict(model, loaded), by_name(theirs, plain))
    train_side_by_side(2, model, fresh, plain, theirs)
    assert_close(model.state_dict(), plain.state_dict())


def by_bias(module: nn.Module) -> torch.optim.Optimizer:
    return grouped(module, lambda name: name.endswith("bias"))


def by_block(module: nn.Module) -> torch.optim.Optimizer:
    return grouped(module, lambda name: "blocks" in name)


def unsharded(net: nn.Module, **options: Any) -> nn.Module:
    return whole(net, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


class Partial(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(5))


class Gains(Net):
    """Trains what has no dimensions: a count and an average look the same in a full state dict."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(name.endswith("gain"))


@pytest.mark.parametrize(
    ("net", "make", "wrap", "form"),
    [
        (Net, by_bias, per_block, (True, True)),
        (Net, by_block, per_block, (False, True)),
        (Gains, adamw, per_block, (False, True)),
        (Gains, adamw, per_block, (True, False)),
        (Partial, sgd, whole, (False, False)),
        (Partial, sgd, per_block, (False, False)),
        (Partial, sgd, per_block, (True, True)),
        (Net, adafactor, unsharded, (True, True)),  # state of any shape
    ],
)
@ranks(2)
def test_training_goes_on_from_state_of_some_parameters_and_groups(rank, world_size, net, make, wrap, form):
    model, ours, plain, theirs = trained(wrap, form[0], make, net)
    state, expected = FSDP.optim_state_dict(model, ours), by_name(theirs, plain)
    if net is Partial and not form[0]:  # its part of the FlatParameter is stepped as well
        assert not state["state"].pop("unused")["momentum_buffer"].any()
    assert_same(state, expected)
    other = wrap(copy.deepcopy(plain), use_orig_params=form[1])
    fresh = make(other)
    resume(other, fresh, state)
    train_side_by_side(2, other, fresh, plain, theirs)
    assert_close(other.state_dict(), plain.state_dict())


@ranks(2)
def test_groups_keep_their_options_in_another_order(rank, world_size):
    model, ours, _, _ = trained(per_block, True, by_bias)
    state = FSDP.optim_state_dict(model, ours)
    swapped = grouped(model, lambda name: not name.endswith("bias"))
    resume(model, swapped, state)
    assert [group["lr"] for group in swapped.param_groups] == [1e-2, 1e-3]
    assert_same(FSDP.optim_state_dict(model, swapped), {**state, "param_groups": state["param_groups"][::-1]})
    with pytest.raises(ValueError, match=r"'shift' and 'stem.bias' are in one group"):
        resume(model, adamw(model), state)


@each_form
@ranks(2)
def test_an_optimizer_that_was_never_stepped(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    ours, fresh = adamw(model), adamw(model)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, ours)
            resume(model, fresh, state)
        assert (state["state"] == {}) == (kind is FULL)
        assert all(entry["step"] == 0 for entry in state["state"].values())
        assert ours.state == fresh.state == {}
    train_side_by_side(2, model, fresh, plain, adamw(plain))
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("make", "wrap", "use_orig_params"), [(adamw, *way) for way in WAYS] + [(sgd, per_block, True)]
)
@ranks(3)
def test_pieces_are_saved_and_loaded_without_communication(rank, world_size, make, wrap, use_orig_params):
    model, ours, plain, theirs = trained(wrap, use_orig_params, make)
    fresh = make(model)
    with FSDP.state_dict_type(model, SHARDED):
        with count_collectives() as counts:
            sharded_optim_state_dict(model, ours, None, to_host=False, all_names=False)  # as checkpoints do
        assert counts == {}
        with count_collectives(objects=False) as counts:  # the ranks only tell each other what they have
            state = FSDP.optim_state_dict(model, ours)
        assert counts == {}
        with count_collectives(objects=False) as counts:  # the ranks only tell each other that pieces fit
            resume(model, fresh, state)
        assert counts == {}
    expected = by_name(theirs, plain)
    assert [*state["state"]] == [*expected["state"]]  # of some a rank has nothing
    for name, entry in expected["state"].items():
        for key, value in entry.items():
            piece = state["state"][name][key]
            if isinstance(piece, IntervalTensor):
                assert piece.shape == value.shape
                expected_piece = value.flatten()[piece.start : piece.stop]
                torch.testing.assert_close(piece.piece, expected_piece, rtol=0, atol=1e-12)
            else:
                torch.testing.assert_close(piece, value, rtol=0, atol=1e-12)
    train_side_by_side(2, model, fresh, plain, theirs)
    assert_close(model.state_dict(), plain.state_dict())


@each_form
@ranks(2)
def test_pieces_alias_the_state_unless_offloaded(rank, world_size, use_orig_params):
    model, optimizer, _, _ = trained(per_block, use_orig_params, steps=1)
    for offload in (True, False):
        config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
        with FSDP.state_dict_type(model, SHARDED, None, config):
            state = FSDP.optim_state_dict(model, optimizer)["state"]
        for entry in state.values():
            entry["exp_avg"].zero_()
            entry["step"].zero_()
        assert any(bool(entry["exp_avg"].any()) for entry in optimizer.state.values()) == offload
        assert all(entry["step"] == 1 for entry in optimizer.state.values())


@each_form
@ranks(2)
def test_keys_of_an_optimizer_with_names_and_of_the_user(rank, world_size, use_orig_params):
    """As optimizers do that name their parameters: keys are names of the wrapped module's parameters."""
    model, ours, plain, theirs = trained(per_block, use_orig_params)
    named = by_name(ours, model)
    named["state"]["of_the_user"] = {"anything": 3}
    state = FSDP.optim_state_dict(model, ours, named)
    assert state["state"].pop("of_the_user") == {"anything": 3}
    assert_same(state, by_name(theirs, plain))
    ours.state["of_the_user"] = {"anything": torch.arange(3)}
    fresh = adamw(model)
    resume(model, fresh, FSDP.optim_state_dict(model, ours))
    assert torch.equal(fresh.state["of_the_user"]["anything"], torch.arange(3))


@ranks(2)
def test_rekeying(rank, world_size):
    model, ours, plain, _ = trained(per_block, True, steps=1)
    state = FSDP.optim_state_dict(model, ours)
    numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model)
    names = [name for name, _ in plain.named_parameters()]
    assert numbered["param_groups"][0]["params"] == list(range(len(names)))
    assert all(numbered["state"][number] is state["state"][name] for number, name in enumerate(names))
    again = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_ID, model)
    assert again["state"].keys() == numbered["state"].keys()
    to_ids, of_stem = OptimStateKeyType.PARAM_ID, plain.stem.parameters()
    arguments: Any
    for error, message, arguments in (
        (TypeError, "OptimStateKeyType", ("names", model)),
        (ValueError, "exclude each other", (to_ids, model, [], ours)),
        (ValueError, "has 2 parameters, and not what the state dict names: shift", (to_ids, plain, of_stem)),
    ):
        with pytest.raises(error, match=message):
            FSDP.rekey_optim_state_dict(state, *arguments)


@each_form
@ranks(2)
def test_state_that_is_not_elementwise(rank, world_size, use_orig_params):
    """Or numbers of what each rank holds, such as a mean of its elements: refused on all ranks."""
    model, ours, _, _ = trained(per_block, use_orig_params, steps=1)
    for kind in (float, torch.tensor):
        for entry in ours.state.values():
            entry["mean"] = kind(float("nan"))
        FSDP.full_optim_state_dict(model, ours)
        for entry in ours.state.values():
            entry["mean"] = kind(float(rank))
        with pytest.raises(ValueError, match=r"'mean' of .* is .*0.* on rank 0 and .*1.* on rank 1"):
            FSDP.full_optim_state_dict(model, ours)
    if not use_orig_params:
        return
    for entry in ours.state.values():
        del entry["mean"]
    state = copy.deepcopy(FSDP.optim_state_dict(model, ours))
    state["state"]["stem.weight"]["factor"] = torch.ones(6)
    param = next(param for name, param in model.named_parameters() if name.endswith("stem.weight"))
    ours.state[param]["factor"] = torch.ones(6)
    for call in (
        lambda: FSDP.optim_state_dict(model, ours),
        lambda: FSDP.sharded_optim_state_dict(model, ours),
        lambda: resume(model, adamw(model), state),
    ):
        with pytest.raises(ValueError, match="'factor' of parameter 'stem.weight'"):
            call()


@ranks(2)
def test_options_that_are_tensors_come_from_the_first_rank(rank, world_size):
    model = per_block(Net())
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor([0.5]), foreach=False)
    given = FSDP.full_optim_state_dict(model, optim)
    scattered = FSDP.scatter_full_optim_state_dict(given if rank == 0 else None, model, optim=optim)
    assert torch.equal(scattered["param_groups"][0]["lr"], torch.tensor([0.5]))


@ranks(2)
def test_state_dicts_that_do_not_fit(rank, world_size):
    model, ours, plain, _ = trained(per_block, True, steps=1)
    fresh = adamw(model)
    unknown, other_shape = (copy.deepcopy(FSDP.optim_state_dict(model, ours)) for _ in range(2))
    unknown["param_groups"][0]["params"].append("nowhere.weight")
    other_shape["state"]["head.weight"]["exp_avg"] = torch.zeros(2, 2)
    state: Any
    for error, message, state in (
        (TypeError, "has the entries 'state' and 'param_groups', and this has NoneType", None),
        (TypeError, "this has \\['model'\\]", {"model": 1}),
        (ValueError, "goes by parameter ids", adamw(plain).state_dict()),
        (ValueError, "model does not have: nowhere.weight", unknown),
        (ValueError, "'exp_avg' of parameter 'head.weight' has shape \\(2, 2\\)", other_shape),
    ):
        with pytest.raises(error, match=message):
            FSDP.optim_state_dict_to_load(model, fresh, state, load_directly=True)
        # The first rank's mistake is every rank's.
        with pytest.raises(error, match=message):
            FSDP.scatter_full_optim_state_dict(state if rank == 0 else None, model, optim=fresh)
        assert fresh.state == {}
    with pytest.raises(ValueError, match="not one of the model's"):
        FSDP.optim_state_dict(model, adamw(plain))
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
        FSDP.optim_state_dict(model, "adam")  # type: ignore[arg-type]


@ranks(2)
def test_counts_that_a_flat_parameter_cannot_have(rank, world_size):
    model, ours, plain, _ = trained(per_block, False, steps=1)
    state = FSDP.optim_state_dict(model, ours)
    other = per_block(copy.deepcopy(plain), use_orig_params=True)
    state["state"]["head.weight"]["step"] += 1
    with pytest.raises(ValueError, match=r"'step' is .* for parameter 'shift' and .* for 'head.weight'"):
        resume(model, adamw(model), state)
    resume(other, adamw(other), state)
    del state["state"]["head.weight"]
    with pytest.raises(ValueError, match=r"'step' is .* for parameter 'shift' and missing for 'head.weight'"):
        resume(model, adamw(model), state)
    fresh = adamw(other)
    resume(other, fresh, state)
    assert "head.weight" not in FSDP.optim_state_dict(other, fresh)["state"]


@pytest.mark.parametrize(("source", "target"), [(per_block, whole), (whole, below_plain)])
@pytest.mark.parametrize("form", [(False, True), (True, False)])
@ranks(3)
def test_pieces_go_to_another_wrapping(rank, world_size, source, target, form):
    model, ours, plain, theirs = trained(source, form[0])
    other = target(copy.deepcopy(plain), use_orig_params=form[1])
    fresh, former = adamw(other), adamw(other)
    pieces = FSDP.sharded_optim_state_dict(model, ours)
    former.load_state_dict(FSDP.flatten_sharded_optim_state_dict(pieces, other, former))
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        resume(other, fresh, FSDP.optim_state_dict(model, ours))
    for loaded in (fresh, former):
        assert_same(FSDP.optim_state_dict(other, loaded), by_name(theirs, plain))


@ranks(3)
def test_pieces_of_fewer_ranks_than_hold_them_now(rank, world_size):
    """What only some ranks have cannot be put together: told alike on all."""
    model, ours, plain, _ = trained(whole, False, steps=1)
    pieces = FSDP.sharded_optim_state_dict(model, ours)
    if rank == 1:
        pieces["state"].clear()
    other = per_block(copy.deepcopy(plain), use_orig_params=False)
    with pytest.raises(
        ValueError, match=r"of shape .* cannot be put together from what the 3 ranks have of it"
    ):
        FSDP.flatten_sharded_optim_state_dict(pieces, other, adamw(other))


@each_form
@ranks(3)
def test_a_rank_whose_optimizer_lacks_parameters_or_a_value_of_them(rank, world_size, use_orig_params):
    """Its part of the state would be zeros: refused on all ranks, also on those that lack nothing."""
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    params = [param for param in model.parameters() if param.numel()]
    ours = adamw(model) if rank != 1 else torch.optim.AdamW(params[:-1], lr=1e-2)
    train_side_by_side(1, model, ours, plain, adamw(plain))
    with pytest.raises(
        RuntimeError, match=r"rank 1 has no optimizer state of parameter '.*, of which rank [02] has"
    ):
        FSDP.full_optim_state_dict(model, ours)
    ours = adamw(model)
    train_side_by_side(1, model, ours, plain, adamw(plain))
    if rank == 1:
        for entry in ours.state.values():
            del entry["exp_avg"]
    with pytest.raises(ValueError, match="optimizer state 'exp_avg' of .* cannot be put together"):
        FSDP.full_optim_state_dict(model, ours)


class Sorting(torch.optim.AdamW):
    """Names its parameters in its state dicts, sorted within groups, as torch's `_NamedOptimizer`."""

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        super().__init__(named.values(), lr=1e-2)
        self.names = {id(param): name for name, param in named.items()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        [group] = state["param_groups"]
        names = [self.names[id(param)] for param in self.param_groups[0]["params"]]
        entries = {names[key]: entry for key, entry in state["state"].items()}
        return {"state": entries, "param_groups": [{**group, "params": sorted(names)}]}


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as torch's `_NamedOptimizer`: it never calls its base's `__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


@ranks(2)
def test_an_optimizer_around_another_one(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    ours, theirs = adamw(model), adamw(plain)
    train_side_by_side(2, model, ours, plain, theirs)
    state = FSDP.optim_state_dict(model, Around(ours))
    fresh = adamw(model)
    around = Around(fresh)
    around.load_state_dict(FSDP.optim_state_dict_to_load(model, around, state))
    assert_same(FSDP.optim_state_dict(model, fresh), by_name(theirs, plain))


def average(param: nn.Parameter) -> None:
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


@pytest.mark.parametrize(("wrap", "use_orig_params"), [(per_block, True), (below_plain, False)])
@ranks(1, 2)
def test_an_optimizer_that_sorts_its_names(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    ours, theirs = Sorting(model), adamw(plain)
    for param in model.parameters():
        if not hasattr(param, "_fsdp_flattened"):  # no instance reduces its gradient
            param.register_post_accumulate_grad_hook(average)
    train_side_by_side(2, model, ours, plain, theirs)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, ours)
            assert set(state["state"]) <= set(by_name(theirs, plain)["state"])
            given = FSDP.optim_state_dict_to_load(model, ours, state, is_named_optimizer=True)
        own = ours.state_dict()
        assert given["state"].keys() == own["state"].keys()
        for name, entry in own["state"].items():
            assert_tensors(given["state"][name], entry)
        numbered = FSDP.optim_state_dict_to_load(model, adamw(model), state, is_named_optimizer=True)
        assert all(isinstance(key, str) for key in numbered["state"])
    if world_size == 1 or wrap is per_block:
        assert_same(FSDP.optim_state_dict(model, ours), by_name(theirs, plain))
