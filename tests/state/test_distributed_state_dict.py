"""The functions of `torch.distributed.checkpoint.state_dict` against torch's on a plain model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._state_dict_utils import _gather_state_dict as gather_state_dict
from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu as offload_state_dict_to_cpu
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.scripts import python
from beside import mean_backward
from fronts import each_form, each_front, full_state, inner, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import IntervalTensor, fully_shard, iter_full_params, replicate
from fsdp_wrap import distributed_state_dict as ours
from fsdp_wrap.distributed_state_dict import StateDictOptions
from fsdp_wrap.wrap import ModuleWrapPolicy
from optim_states import assert_same, grouped
from state_nets import (
    WIDTH,
    Buffered,
    Net,
    Tied,
    adamw,
    assert_close,
    assert_equal,
    below_plain,
    changed,
    per_block,
    train_side_by_side,
    wrapped_and_plain,
)


def test_functions_are_torchs():
    assert len(ours.__all__) == 7
    for name in ours.__all__:
        assert getattr(ours, name) is getattr(theirs, name)


@each_front
@ranks(2)
def test_full_state_dicts_are_those_of_a_plain_model(rank, world_size, front):
    plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh())).double()
    model = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({nn.Sequential}))
    optimizer, reference = adamw(model), adamw(plain)
    train_side_by_side(2, model, optimizer, plain, reference)
    expected, expected_optim = theirs.get_state_dict(plain, reference)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        model_state, optim_state = theirs.get_state_dict(model, optimizer, options=options)
        if offload and rank:
            assert (model_state, optim_state) == ({}, {})
        else:
            assert_close(model_state, expected)
            assert_same(optim_state, expected_optim)
    if front != "composable":
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model_state, optim_state = copy.deepcopy((expected, expected_optim) if rank == 0 else ({}, {}))
    model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    fresh = adamw(model)
    both: dict[str, Any] = {"model_state_dict": model_state, "optim_state_dict": optim_state}
    theirs.set_state_dict(model, fresh, **copy.deepcopy(both), options=options)
    theirs.set_state_dict(model, fresh, **both | {"model_state_dict": {}}, options=options)
    train_side_by_side(2, model, fresh, plain, reference)
    assert_close(full_state(model), plain.state_dict())


@ranks(4)
def test_the_first_of_all_ranks_broadcasts_to_models_on_parts_of_the_ranks(rank, world_size):
    """As torch's functions do, which give it the state dicts and all others none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)).double()
    first, second = (shard("composable", copy.deepcopy(plain), device_mesh=mesh) for _ in range(2))
    optimizer, fresh = adamw(first), adamw(second)
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    first(batch).square().mean().backward()
    optimizer.step()
    whole: dict[str, Any] = {"full_state_dict": True, "cpu_offload": True}
    model, optim = theirs.get_state_dict(first, optimizer, options=StateDictOptions(**whole))
    assert (model != {}) == (optim != {}) == (rank == 0)
    given: dict[str, Any] = {"model_state_dict": model, "optim_state_dict": optim}
    options = StateDictOptions(**whole, broadcast_from_rank0=True)
    theirs.set_state_dict(second, fresh, **given, options=options)
    assert_equal(full_state(second), full_state(first))
    found = theirs.get_optimizer_state_dict(second, fresh)
    expected = theirs.get_optimizer_state_dict(first, optimizer)
    assert_same({**found, "param_groups": []}, {**expected, "param_groups": []})  # torch makes lists of betas


@each_form
@ranks(2)
def test_a_full_state_read_into_that_of_an_optimizer_that_was_never_stepped(
    rank, world_size, use_orig_params
):
    """As DCP reads: into what it is given, and nothing else."""
    model, plain = wrapped_and_plain(Buffered, per_block, use_orig_params)
    optimizer, reference, fresh = adamw(model), adamw(plain), adamw(model)
    model.eval(), plain.eval()
    train_side_by_side(2, model, optimizer, plain, reference)
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    saved: Any = theirs.get_optimizer_state_dict(model, optimizer, options=options)
    begun: Any = theirs.get_optimizer_state_dict(model, fresh, options=options)
    assert fresh.state == {} and begun["state"].keys() == saved["state"].keys()
    for name, entry in begun["state"].items():
        assert entry["step"] == 0 and not entry["exp_avg"].any()
        for key, value in entry.items():
            value.copy_(saved["state"][name][key])
    theirs.set_optimizer_state_dict(model, fresh, begun, options=options)
    train_side_by_side(2, model, fresh, plain, reference)
    assert_close(model.state_dict(), plain.state_dict())


class Experts(nn.Module):
    """A layer between two others, out of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts[self.chosen](self.first(x)))


@pytest.mark.parametrize(
    ("front", "way"),
    [
        ("composable", "full"),
        ("composable", "first_rank"),
        ("composable", "pieces"),
        ("replicate", "full"),
        ("orig", "full"),
    ],
)
@ranks(2)
def test_a_new_optimizer_beside_gradients_and_experts_that_were_never_stepped(rank, world_size, front, way):
    """The next step is that of the plain model, also of an expert that has no state yet."""
    torch.manual_seed(0)
    plain = Experts().double()
    model: Any = copy.deepcopy(plain)
    if front == "replicate":
        for module in (*model.experts, model):
            replicate(module)
    else:
        model = shard(front, model, ModuleWrapPolicy({nn.Sequential}))

    def backward(number: int, chosen: int) -> None:
        batches = [
            torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9 * number + r)) for r in (0, 1)
        ]
        inner(model).chosen = plain.chosen = chosen
        model(batches[rank].double()).square().mean().backward()
        mean_backward(lambda other: plain(batches[other].double()).square().mean())

    def step(*optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    optimizer, reference = adamw(model), adamw(plain)
    for number in range(3):
        backward(number, number % 2)
        step(optimizer, reference)
    options = StateDictOptions(full_state_dict=way != "pieces", broadcast_from_rank0=way == "first_rank")
    saved: Any = ours.get_optimizer_state_dict(model, optimizer, options=options)
    before = copy.deepcopy(saved)
    fresh = adamw(model)
    backward(3, 1)
    given = saved if way != "first_rank" or rank == 0 else {}
    ours.set_optimizer_state_dict(model, fresh, given, options=options)
    step(fresh, reference)
    for number in range(4, 7):
        backward(number, number % 3)
        step(fresh, reference)
    assert_close(full_state(model), plain.state_dict())
    if way != "pieces":  # which are the optimizer's own memory, as torch's functions load them
        assert_same(saved, before)


@pytest.mark.parametrize(
    ("way", "flatten", "use_orig_params"),
    [
        ("pieces", False, True),
        ("pieces", True, True),
        ("full", True, False),
        ("full", False, False),
        ("first_rank", False, True),
        ("first_rank", True, True),
    ],
)
@ranks(3)
def test_setting_what_was_got(rank, world_size, way, flatten, use_orig_params):
    model, plain = wrapped_and_plain(Buffered, per_block, use_orig_params)
    model.eval(), plain.eval()  # batches differ, and so would statistics
    optimizer, reference = adamw(model), adamw(plain)
    train_side_by_side(2, model, optimizer, plain, reference)
    options = StateDictOptions(
        full_state_dict=way != "pieces",
        cpu_offload=way == "first_rank",
        broadcast_from_rank0=way == "first_rank",
        flatten_optimizer_state_dict=flatten,
    )
    state, optim_state = theirs.get_state_dict(model, optimizer, options=options)
    assert ("state" in optim_state or not optim_state) != flatten or (way == "first_rank" and rank > 0)
    state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)
    model.load_state_dict(changed(plain.state_dict()))
    fresh = adamw(model)
    loaded: Any
    for loaded in (state, {}):  # the latter on all ranks: the optimizer only
        keys = theirs.set_state_dict(
            model,
            fresh,
            model_state_dict=loaded,
            optim_state_dict=copy.deepcopy(optim_state),
            options=options,
        )
        assert str(keys) == "<All keys matched successfully>"
    train_side_by_side(2, model, fresh, plain, reference)
    assert_close(model.state_dict(), plain.state_dict())


@ranks(2)
def test_several_optimizers(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    one, other = (
        [
            torch.optim.SGD(module.module.head.parameters() if module is model else module.head.parameters()),
            torch.optim.AdamW([p for name, p in module.named_parameters() if "head" not in name], lr=1e-2),
        ]
        for module in (model, plain)
    )
    for pair in zip(one, other):
        train_side_by_side(2, model, pair[0], plain, pair[1])
    options = StateDictOptions(full_state_dict=True)
    state = theirs.get_optimizer_state_dict(model, one, options=options)
    assert_same(state, theirs.get_optimizer_state_dict(plain, other))
    fresh = copy.copy(one[1])
    fresh.state = type(one[1].state)(dict)
    theirs.set_optimizer_state_dict(model, [one[0], fresh], state, options=options)
    assert_same(theirs.get_optimizer_state_dict(model, [one[0], fresh], options=options), state)


@ranks(2)
def test_frozen_parameters_left_out_and_submodules(rank, world_size):
    net = Tied().double()
    net.blocks[1].up.requires_grad_(False)
    model = per_block(copy.deepcopy(net), use_orig_params=True)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = theirs.get_model_state_dict(model, options=options)
    frozen = {"blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.up.bias"}
    assert_equal(state, {name: value for name, value in net.state_dict().items() if name not in frozen})
    block = model.module.blocks[1]
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
    state = theirs.get_model_state_dict(model, submodules={block}, options=options)
    assert_equal(state, net.blocks[1].state_dict())
    state = theirs.get_model_state_dict(model, submodules={block})
    assert set(state) == {f"blocks.1.{name}" for name in net.blocks[1].state_dict()}


@pytest.mark.parametrize("front", ["orig", "flat"])
@pytest.mark.parametrize("compiled", ["all", "a block", "a unit", "what a unit wraps"])
@ranks(2)
def test_state_dicts_are_without_the_names_of_compiling(rank, world_size, front, compiled, tmp_path):
    def made(compiling: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        def by(place: str, module: nn.Module) -> nn.Module:
            fitting = compiling and place == compiled
            result: Any = torch.compile(module, backend="eager") if fitting else module
            return result

        torch.manual_seed(0)
        block = by("a block", nn.Linear(WIDTH, WIDTH).double())
        pair = by("what a unit wraps", nn.Sequential(block, nn.BatchNorm1d(WIDTH).double()))
        unit = by("a unit", shard(front, pair))
        model = by("all", shard(front, nn.Sequential(unit, nn.Linear(WIDTH, WIDTH).double())))
        return model, adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    batches = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    for way in ("nested", "flattened", "folder"):
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=way == "flattened")
        states = []
        for first, then in ((True, False), (False, True)):  # which of them are compiled
            model, optimizer = made(first)
            for batch in batches[:2]:
                step(model, optimizer, batch)
            state, optim = theirs.get_state_dict(model, optimizer, options=options)
            states.append(copy.deepcopy((state, optim)))
            assert dict(iter_full_params(model, buffers=True)).keys() == state.keys()
            other, fresh = made(then)
            sent = ours._from_first_rank(other, {f"_orig_mod.{name}": value for name, value in state.items()})
            assert isinstance(sent["_orig_mod.0.0.weight"], IntervalTensor), "each rank keeps its pieces"
            if way == "folder":
                checkpoint = pytest.importorskip("fsdp_wrap.checkpoint")
                checkpoint.save(tmp_path / f"{first}", model, optimizer)
                checkpoint.load(tmp_path / f"{first}", other, fresh)
            else:
                theirs.set_state_dict(
                    other, fresh, model_state_dict=state, optim_state_dict=optim, options=options
                )
            step(model, optimizer, batches[2])
            step(other, fresh, batches[2])
            assert_equal(*(theirs.get_model_state_dict(net, options=options) for net in (model, other)))
        (state, optim), expected = states
        assert list(state)[0] == "0.0.weight"
        assert_equal(state, expected[0])
        (assert_equal if way == "flattened" else assert_same)(optim, expected[1])


@ranks(2)
def test_states_of_modules_are_taken_by_module(rank, world_size):
    plain = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()), nn.Linear(3, 2)).double()
    options = StateDictOptions(full_state_dict=True)
    model = FSDP(copy.deepcopy(plain))
    first, expected = model.module[0], theirs.get_model_state_dict(model, options=options)
    given = changed(plain[0].state_dict())
    keys = theirs.set_model_state_dict(
        model, {first: given}, options=StateDictOptions(strict=False, full_state_dict=True)
    )
    assert keys.missing_keys == ["1.weight", "1.bias"]
    state = theirs.get_model_state_dict(model, options=options)
    assert_equal(state, expected | {f"0.{name}": value for name, value in given.items()})


@ranks(2)
def test_state_of_parameters_that_only_another_model_has_is_left_out_unless_strict(rank, world_size):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    model, full = FSDP(copy.deepcopy(plain)), StateDictOptions(full_state_dict=True)
    other, plain_other = adamw(model), adamw(plain)
    train_side_by_side(2, model, other, plain, plain_other)
    saved = theirs.get_optimizer_state_dict(model, other, options=full)
    first = FSDP(copy.deepcopy(plain[:1]))
    optimizer = adamw(first)
    with pytest.raises(ValueError, match=r"parameters that the model does not have: 2.weight, 2.bias"):
        theirs.set_optimizer_state_dict(first, optimizer, copy.deepcopy(saved))
    lenient = StateDictOptions(strict=False)
    theirs.set_optimizer_state_dict(first, optimizer, copy.deepcopy(saved), options=lenient)
    state = theirs.get_optimizer_state_dict(first, optimizer, options=full)
    expected: Any = theirs.get_optimizer_state_dict(plain, plain_other)
    names = [name for name in expected["state"] if name.startswith("0.")]
    groups = [{**group, "params": names} for group in expected["param_groups"]]
    states = {name: expected["state"][name] for name in names}
    assert_same(state, {"state": states, "param_groups": groups})


@ranks(2)
def test_what_does_not_fit(rank, world_size):
    model, _ = wrapped_and_plain(Net, per_block, True)
    optimizer = grouped(model, lambda name: "head" in name)
    before = model.state_dict()
    head = before["head.weight"]
    to_all = StateDictOptions(broadcast_from_rank0=True)
    first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    wrong = before | {"head.weight": head.numpy()}
    given: Any
    for error, words, given, options in (
        (ValueError, "full_state_dict must be True when broadcast_from_rank0", {}, to_all),
        (RuntimeError, r"head\.weight.*expected a tensor", wrong, first),
        (RuntimeError, "Missing key", {"head.weight": head}, None),
    ):
        with pytest.raises(error, match=words):
            theirs.set_model_state_dict(model, given, options=options)
    for name in ("state.nowhere.step", "state.head.weight"):
        with pytest.raises(ValueError, match=f"'{name}' names no parameter"):
            theirs.set_optimizer_state_dict(model, optimizer, {name: 1})  # type: ignore[dict-item]
    lenient = StateDictOptions(strict=False)
    keys = theirs.set_model_state_dict(model, {"head.weight": head}, options=lenient)
    assert "stem.weight" in keys.missing_keys
    assert "stem.weight" in theirs.set_model_state_dict(model, {}, options=lenient).missing_keys
    assert_equal(model.state_dict(), before)


@ranks(2)
def test_torchs_own_functions_find_our_wrappers(rank, world_size):
    """Without `fsdp_wrap.compat`: by default pieces, which they gather, offload and load; also of parts."""
    model, plain = wrapped_and_plain(Buffered, below_plain, True)
    state = theirs.get_model_state_dict(model)
    assert isinstance(state["stem.weight"], IntervalTensor)
    for gathered in (gather_state_dict(state), gather_state_dict(state, cpu_offload=True)):
        assert_equal(gathered, plain.state_dict())
    on_first = gather_state_dict({"model": state}, cpu_offload=True, ranks_only=(0,))
    assert_equal(on_first.get("model", {}), plain.state_dict() if rank == 0 else {})
    assert_equal(gather_state_dict(offload_state_dict_to_cpu(state)), plain.state_dict())
    other = changed(plain.state_dict())
    options = StateDictOptions(full_state_dict=True)
    assert (
        str(theirs.set_model_state_dict(model, other, options=options)) == "<All keys matched successfully>"
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = theirs.get_model_state_dict(model, options=options)
    assert_equal(saved, other if rank == 0 else {})

    net = Net().double()
    part: nn.Module = copy.deepcopy(net)
    fully_shard(part.head)
    part = FSDP(part, use_orig_params=True)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        saved = theirs.get_model_state_dict(part, options=options)
        assert_equal(saved, net.state_dict() if rank == 0 or not offload else {})


@each_front
@ranks(2)
def test_methods_that_torch_has_patched(rank, world_size, front):
    """`_patch_model_state_dict` makes `state_dict()` call the functions, which must not call it again."""
    plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh())).double()
    model = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({nn.Sequential}))
    optimizer, reference = adamw(model), adamw(plain)
    train_side_by_side(2, model, optimizer, plain, reference)
    options = StateDictOptions(full_state_dict=True)
    theirs._patch_model_state_dict(model, options=options)
    theirs._patch_optimizer_state_dict(model, optimizers=optimizer, options=options)
    state, moments = model.state_dict(), optimizer.state_dict()
    assert_close(state, plain.state_dict())
    assert_same(moments, theirs.get_optimizer_state_dict(plain, reference))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    train_side_by_side(2, model, optimizer, plain, reference)
    assert_close(model.state_dict(), plain.state_dict())


@ranks(2)
def test_an_empty_model_state_dict_means_the_optimizer_alone(rank, world_size):
    """Also for models without our wrappers, as torch's function takes it."""
    for model in (FSDP(Net()), nn.parallel.DistributedDataParallel(Net())):
        optimizer, again = adamw(model), adamw(model)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        state = theirs.get_optimizer_state_dict(model, optimizer)
        keys = theirs.set_state_dict(model, again, model_state_dict={}, optim_state_dict=state)
        assert keys.missing_keys == keys.unexpected_keys == []
        steps = [again.state[param]["step"] for param in model.parameters()]
        assert steps and set(map(float, steps)) == {1.0}
    theirs.set_state_dict(
        model, optimizer, model_state_dict=model.module.state_dict(), optim_state_dict=state
    )


IMPORT_AND_WRAP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils, checkpoint, device_mesh, fsdp, tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import SGD

def held_by_torch():
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    namespaces = {name: dict(vars(module)) for name, module in modules.items() if hasattr(module, "__dict__")}
    classes = [value for held in namespaces.values() for value in held.values() if isinstance(value, type)]
    return namespaces, {cls: dict(vars(cls)) for cls in classes if cls.__module__.startswith("torch")}

modules, classes = held_by_torch()
import fsdp_wrap
assert "torch.distributed.checkpoint.state_dict" in modules and tensor.DTensor in classes
for before, after in zip((modules, classes), held_by_torch()):
    for owner, held in before.items():
        changed = [name for name, value in held.items() if after[owner].get(name) is not value]
        assert changed in ([], ["_marked_safe_globals_set"]), (owner, changed)  # `add_safe_globals`

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
names = plain.state_dict().keys()
model = fsdp_wrap.FullyShardedDataParallel(plain)
assert get_model_state_dict(model).keys() == names
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
assert get_optimizer_state_dict(model, optimizer)["state"].keys() == names
rebound = checkpoint.state_dict._get_model_state_dict
assert rebound is not modules[checkpoint.state_dict.__name__]["_get_model_state_dict"]
fsdp_wrap.fully_shard(nn.Linear(2, 2))
assert checkpoint.state_dict._get_model_state_dict is rebound, "once"
dist.destroy_process_group()
"""


def test_importing_changes_nothing_of_torchs_and_wrapping_adapts_its_functions():
    python("-W", "ignore", "-c", IMPORT_AND_WRAP)
