"""Bad input: a clear error before anything changes, and a model that is as usable as before."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bed import ranks
from fronts import each_form
from fsdp_wrap import BackwardPrefetch, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy, NameWrapPolicy
from nets import WIDTH, Block, Net


def make_net(cls: type[nn.Module] = Net) -> nn.Module:
    return cls().double()


def per_block(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def plain_and_wrapped(use_orig_params: bool) -> tuple[nn.Module, FSDP]:
    net = make_net()
    return copy.deepcopy(net), per_block(net, use_orig_params=use_orig_params)


each_wrapping = pytest.mark.parametrize("wrap", [FSDP, per_block], ids=["whole", "per_block"])


def facts(tensor: torch.Tensor) -> list[Any]:
    values = None if tensor.is_meta else tensor.detach().flatten().tolist()
    grad = None if tensor.grad is None else tensor.grad.flatten().tolist()
    hooks = len(tensor._backward_hooks or ())
    return [
        id(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad,
        sorted(vars(tensor)), values, grad, hooks,
    ]  # fmt: skip


def fingerprint(module: nn.Module) -> list[Any]:
    """All that a refused call could have changed: the tree, the tensors, their values and attributes."""
    tree = [
        (name, id(child), sorted(vars(child)), child.training)
        for name, child in module.named_modules(remove_duplicate=False)
    ]
    params = [(name, facts(param)) for name, param in module.named_parameters(remove_duplicate=False)]
    buffers = [(name, facts(buffer)) for name, buffer in module.named_buffers(remove_duplicate=False)]
    return [*tree, *params, *buffers]


@contextmanager
def refused(module: nn.Module, error: type[Exception], *words: str) -> Iterator[None]:
    """The body raises an error that says `words`, and leaves `module` exactly as it was."""
    before = fingerprint(module)
    with pytest.raises(error) as caught:
        yield
    unsaid = [word for word in words if word not in str(caught.value)]
    assert not unsaid, f"the message lacks {unsaid}: {caught.value}"
    after = fingerprint(module)
    assert [(old, new) for old, new in zip(before, after) if old != new] == []
    assert len(after) == len(before)


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    expected, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def assert_trains_like(plain: nn.Module, model: nn.Module, members: list[int] | None = None) -> None:
    """Two steps of `model` equal those of `plain`, which sees the batches of all the ranks (`members`)."""
    members = list(range(dist.get_world_size())) if members is None else members
    pairs = [(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in (model, plain)]
    for _ in range(2):
        batches = torch.randn(dist.get_world_size(), 4, WIDTH, dtype=torch.float64)
        inputs = [batches[dist.get_rank()], batches[members].flatten(0, 1)]
        for (module, optimizer), batch in zip(pairs, inputs):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    assert_same_state(model, plain)


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        raise AssertionError("the context was entered")


def a_batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64)


# What is wrapped.


@pytest.mark.parametrize(
    ("what", "named"), [(3, "int"), (print, "builtin"), (nn.Linear, "type"), (None, "NoneType")]
)
@ranks(1)
def test_what_is_no_module(rank, world_size, what, named):
    with pytest.raises(TypeError, match=rf"torch\.nn\.Module, not .*{named}"):
        FSDP(what)


@each_form
@pytest.mark.parametrize("which", ["wrapper", "module"])
@ranks(2)
def test_wrapping_twice(rank, world_size, use_orig_params, which):
    net = make_net()
    plain = copy.deepcopy(net)
    model = FSDP(net, use_orig_params=use_orig_params)
    with refused(model, ValueError, "already wrapped", "Net"):
        FSDP({"wrapper": model, "module": net}[which], use_orig_params=use_orig_params)
    assert_trains_like(plain, model)


@ranks(1)
def test_wrapping_a_container_warns(rank, world_size):
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"one": nn.Linear(2, 2)})):
        with pytest.warns(UserWarning, match="a Module.* has no forward") as caught:
            FSDP(container)
        assert caught[0].filename == __file__


@each_form
@ranks(2)
def test_wrapping_a_part_of_what_is_wrapped(rank, world_size, use_orig_params):
    net = make_net()
    plain = copy.deepcopy(net)
    model = FSDP(net, use_orig_params=use_orig_params)
    with refused(model, ValueError, "already", "Block"):
        FSDP(net.blocks[0], use_orig_params=use_orig_params)
    assert_trains_like(plain, model)


@each_form
@ranks(2)
def test_policy_for_a_tree_that_holds_wrapped_modules(rank, world_size, use_orig_params):
    net = make_net()
    plain = copy.deepcopy(net)
    net.blocks[1] = FSDP(net.blocks[1], use_orig_params=use_orig_params)
    with refused(net, ValueError, "'blocks.1'", "by the policy too", "by hand"):
        per_block(net, use_orig_params=use_orig_params)
    assert_trains_like(plain, FSDP(net, use_orig_params=use_orig_params))


BAD_OVERRIDES: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "sharding_strategy": ({"sharding_strategy": "ZERO3"}, TypeError),
    "mixed_precision": ({"mixed_precision": torch.bfloat16}, TypeError),
    "process_group": ({"process_group": "gloo"}, TypeError),
    "strategy": ({"strategy": ShardingStrategy.FULL_SHARD}, TypeError),
}


@pytest.mark.parametrize("name", list(BAD_OVERRIDES))
@ranks(2)
def test_policy_that_overrides_with_a_bad_argument_wraps_nothing(rank, world_size, name):
    overrides, error = BAD_OVERRIDES[name]

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return overrides if getattr(module, "out_features", 0) == 3 else isinstance(module, Block)

    net = make_net()
    with refused(net, error, name):
        FSDP(net, auto_wrap_policy=CustomPolicy(choose))
    plain = copy.deepcopy(net)
    assert_trains_like(plain, per_block(net))


@pytest.mark.parametrize("names", [["Blok"], ["Blok", "encoder.Layer"]], ids=["one", "two"])
@ranks(2)
def test_name_policy_that_matches_nothing(rank, world_size, names):
    net = make_net()
    present = ["Block (2)", "Linear (6)", "ModuleList (1)", "Net (1)"]
    with refused(net, ValueError, *map(repr, names), "did you mean 'Block'?", *present):
        FSDP(net, auto_wrap_policy=NameWrapPolicy(names))
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net, auto_wrap_policy=NameWrapPolicy("Block")))


# Parameters and buffers.


def to_meta(module: nn.Module, *names: str) -> None:
    for name in names:
        owner, _, attribute = name.rpartition(".")
        place = module.get_submodule(owner)
        setattr(place, attribute, nn.Parameter(getattr(place, attribute).to("meta")))


class OwnScale(Net):
    """With a parameter that a module without `reset_parameters` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].scale = nn.Parameter(torch.ones(WIDTH))


@each_wrapping
@pytest.mark.parametrize("device_id", [None, "cpu"])
@ranks(2)
def test_parameter_on_the_meta_device_that_nothing_initialises(rank, world_size, wrap, device_id):
    net = make_net(OwnScale)
    plain = copy.deepcopy(net)
    to_meta(net, "blocks.1.scale")
    words = ["'blocks.1.scale'", "meta", "Block", "reset_parameters", "param_init_fn", "to_empty"]
    with refused(net, ValueError, *words):
        wrap(net, device_id=device_id and torch.device(device_id))
    net.blocks[1].scale = nn.Parameter(plain.blocks[1].scale.detach().clone())
    assert_trains_like(plain, wrap(net))


@each_wrapping
@ranks(2)
def test_module_without_values(rank, world_size, wrap):
    plain = make_net(OwnScale)
    with torch.device("meta"):
        net = make_net(OwnScale)
    with refused(net, ValueError, "'blocks.1.scale'", "meta", "to_empty"):
        wrap(net)
    net.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert_trains_like(plain, wrap(net))


@each_wrapping
@pytest.mark.parametrize("what", ["meta", "subclass"])
@ranks(2, 3)
def test_first_rank_with_nothing_to_send(rank, world_size, wrap, what):
    """Only it can tell, and no rank waits for it."""
    net = make_net(OwnScale)
    if rank == 0 and what == "meta":
        to_meta(net, "blocks.1.scale")
    elif rank == 0:
        net.blocks[1].scale = Special(net.blocks[1].scale.detach())
    error = TypeError if rank == 0 and what == "subclass" else ValueError
    words = ["'blocks.1.scale'"] if rank == 0 else ["'blocks.1.scale'", "nothing was wrapped", "rank 0"]
    with refused(net, error, *words):
        wrap(net, sync_module_states=True)
    net, plain = make_net(OwnScale), make_net(OwnScale)
    states = [net.state_dict()]
    dist.broadcast_object_list(states)
    plain.load_state_dict(states[0])
    assert_trains_like(plain, wrap(net, sync_module_states=True))


@pytest.mark.parametrize("function", ["reset", 3], ids=str)
@ranks(2)
def test_param_init_fn_that_is_no_function(rank, world_size, function):
    net = make_net()
    with refused(net, ValueError, "param_init_fn", "callable with a module", repr(function)):
        per_block(net, param_init_fn=function)


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_buffer("offset", torch.zeros(WIDTH))


@each_wrapping
@pytest.mark.parametrize("device_id", [None, "cpu"])
@ranks(2)
def test_buffer_on_another_device(rank, world_size, wrap, device_id):
    net = make_net(Buffered)
    plain = copy.deepcopy(net)
    net.blocks[1].offset = net.blocks[1].offset.to("meta")
    with refused(net, ValueError, "blocks.1.offset'", "meta"):
        wrap(net, device_id=device_id and torch.device(device_id))
    net.blocks[1].offset = plain.blocks[1].offset.clone()
    assert_trains_like(plain, wrap(net))


class Special(nn.Parameter):
    pass


@each_wrapping
@ranks(2)
def test_parameter_subclass(rank, world_size, wrap):
    net = make_net()
    plain = copy.deepcopy(net)
    net.blocks[1].up.bias = Special(net.blocks[1].up.bias.detach())
    with refused(net, TypeError, "'blocks.1.up.bias'", "Special", "ignored_states", "torch.nn.Parameter"):
        wrap(net)
    net.blocks[1].up.bias = nn.Parameter(net.blocks[1].up.bias.detach().clone())
    assert_trains_like(plain, wrap(net))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@each_wrapping
@ranks(2)
def test_gradient_hook(rank, world_size, wrap, kind):
    net = make_net()
    plain = copy.deepcopy(net)
    hook = getattr(net.blocks[1].up.weight, kind)(lambda _: None)
    with refused(net, ValueError, "'blocks.1.up.weight'", "hook", "remove"):
        wrap(net)
    hook.remove()
    assert_trains_like(plain, wrap(net))


@each_form
@ranks(2)
def test_parameter_tied_between_modules_wrapped_by_hand_is_supported(rank, world_size, use_orig_params):
    net = make_net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    plain = copy.deepcopy(net)
    for index in range(2):
        net.blocks[index] = FSDP(net.blocks[index], use_orig_params=use_orig_params)
    model = FSDP(net, use_orig_params=use_orig_params)
    assert_same_state(model, plain)
    assert_trains_like(plain, model)


class Scaled(nn.Module):
    """A 0-d parameter beside others, and one that is all its module has."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.3))

        def forward(self, x):
            return x * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.7))
        self.linear, self.last = nn.Linear(WIDTH, 3), self.Gain()

    def forward(self, x):
        return self.last(torch.tanh(self.linear(x) + self.shift))


@each_form
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Scaled.Gain})], ids=["whole", "alone"])
@ranks(1, 2, 3)
def test_parameter_without_dimensions_is_supported(rank, world_size, use_orig_params, policy):
    net = make_net(Scaled)
    plain = copy.deepcopy(net)
    model = FSDP(net, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert_same_state(model, plain)
    assert_trains_like(plain, model)
    assert model.state_dict()["shift"].shape == ()


# Process groups.


@ranks(1, backend=None)
def test_no_process_group(rank, world_size):
    net = make_net()
    with refused(net, ValueError, "process group", "torch.distributed.init_process_group()"):
        FSDP(net)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net))


def halves(world_size: int) -> list[list[int]]:
    middle = world_size // 2
    return [list(range(middle)), list(range(middle, world_size))]


@pytest.mark.parametrize("kind", ["process_group", "device_mesh"])
@ranks(2, 4)
def test_group_of_other_ranks(rank, world_size, kind):
    groups: list[Any] = [
        dist.new_group(members) if kind == "process_group" else DeviceMesh("cpu", members)
        for members in halves(world_size)
    ]
    own = int(rank >= world_size // 2)
    net = make_net()
    plain = copy.deepcopy(net)
    with refused(net, ValueError, f"rank {rank} is not part of", kind):
        per_block(net, **{kind: groups[1 - own]})
    assert_trains_like(plain, per_block(net, **{kind: groups[own]}), halves(world_size)[own])


@ranks(2)
def test_group_and_mesh_exclude_each_other(rank, world_size):
    net, mesh = make_net(), init_device_mesh("cpu", (world_size,))
    with refused(net, ValueError, "process_group", "device_mesh", "one of them"):
        FSDP(net, process_group=dist.group.WORLD, device_mesh=mesh)
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net, device_mesh=mesh))


HYBRID = ShardingStrategy.HYBRID_SHARD


@pytest.mark.parametrize("kind", ["process_group", "device_mesh"])
@ranks(2)
def test_groups_and_strategy_must_go_together(rank, world_size, kind):
    net, pair = make_net(), (dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True))
    one, two = (pair[0], pair) if kind == "process_group" else (make_mesh(2), make_mesh(1, 2))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        with refused(net, ValueError, f"{strategy} takes one process group", "HYBRID_SHARD"):
            per_block(net, sharding_strategy=ShardingStrategy[strategy], **{kind: two})
    with refused(net, ValueError, "HYBRID_SHARD", "pair", "two dimensions"):
        per_block(net, sharding_strategy=HYBRID, **{kind: one})
    plain = copy.deepcopy(net)
    assert_trains_like(plain, per_block(net, sharding_strategy=HYBRID, **{kind: two}))


def make_mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


@pytest.mark.parametrize("wrong", [0, 1], ids=["shard", "replicate"])
@ranks(4)
def test_hybrid_group_of_other_ranks(rank, world_size, wrong):
    shard = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    replicate = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    own = [shard[rank // 2], replicate[rank % 2]]
    others = [shard[1 - rank // 2], replicate[1 - rank % 2]]
    net = make_net()
    mixed = tuple(others[place] if place == wrong else own[place] for place in range(2))
    with refused(net, ValueError, f"rank {rank} is not part of", "process_group"):
        per_block(net, process_group=mixed, sharding_strategy=HYBRID)
    plain = copy.deepcopy(net)
    assert_trains_like(plain, per_block(net, process_group=tuple(own), sharding_strategy=HYBRID))


# Arguments.

WRONG_TYPES: dict[str, list[Callable[[nn.Module], Any]]] = {
    "sharding_strategy": [lambda net: "FULL_SHARD", lambda net: 1, lambda net: BackwardPrefetch.BACKWARD_PRE],
    "backward_prefetch": [lambda net: "BACKWARD_PRE", lambda net: True],
    "ignored_modules": [lambda net: net.head, lambda net: 3],
    "ignored_states": [lambda net: net.head, lambda net: 3],
    "process_group": [lambda net: "gloo", lambda net: dist.get_rank()],
    "device_mesh": [lambda net: "cpu", lambda net: [0, 1]],
    "cpu_offload": [lambda net: True],
}


IGNORED: dict[str, list[Callable[[nn.Module], Any]]] = {
    "ignored_modules": [lambda net: ["head"], lambda net: [net.head.weight]],
    "ignored_states": [lambda net: net.head.weight.shape, lambda net: ["head.weight"]],
}
WRONG = [
    *((argument, makes, TypeError, (argument,)) for argument, makes in WRONG_TYPES.items()),
    *(
        (argument, makes, ValueError, (argument, "objects only, found"))
        for argument, makes in IGNORED.items()
    ),
]


@pytest.mark.parametrize(
    "number", range(len(WRONG)), ids=[f"{argument}-{error.__name__}" for argument, _, error, _ in WRONG]
)
@ranks(2)
def test_wrong_argument(rank, world_size, number):
    argument, makes, error, told = WRONG[number]
    net = make_net()
    plain = copy.deepcopy(net)
    for make in makes:
        with refused(net, error, *told):
            per_block(net, **{argument: make(net)})
    assert_trains_like(plain, FSDP(net))


@ranks(2)
def test_policy_of_a_wrong_type(rank, world_size):
    net = make_net()
    for policy in ({Block}, "Block"):
        with refused(net, TypeError, "auto_wrap_policy", "ModuleWrapPolicy"):
            FSDP(net, auto_wrap_policy=policy)
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net))


@ranks(2)
def test_two_ways_of_ignoring(rank, world_size):
    net = make_net()
    with refused(net, ValueError, "ignored_modules", "ignored_states", "exclude each other"):
        FSDP(net, ignored_modules=[net.head], ignored_states=[net.stem.weight])
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net))


@pytest.mark.parametrize("argument", list(IGNORED))
@ranks(2)
def test_ignoring_what_is_sharded(rank, world_size, argument):
    net = make_net()
    net.head = FSDP(net.head)
    with refused(net, ValueError, argument, "FullyShardedDataParallel that is sharded already"):
        FSDP(net, **{argument: [net.head]})  # type: ignore[arg-type]


# Checkpoints.


class Normed(Net):
    """With modules that load in ways of their own: a version check, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.blocks[1].register_load_state_dict_pre_hook(lambda *args: None)

    def forward(self, x):
        return self.norm(super().forward(x))


def moved_on(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict that fits, of which no value is the module's."""
    return {name: value + 1 for name, value in module.state_dict().items()}


def spoil(state: dict[str, Any], how: str) -> list[str]:
    """Makes a state dict unfit; returns what the error must say."""
    if how in ("missing", "all"):
        del state["stem.weight"], state["blocks.1.up.bias"]
    if how in ("unexpected", "all"):
        state["blocks.2.up.bias"] = state["extra"] = torch.zeros(2)
    if how in ("shape", "all"):
        state["head.weight"], state["blocks.0.down.bias"] = torch.zeros(4, WIDTH), torch.zeros(WIDTH + 1)
    if how == "no tensor":
        state["blocks.0.up.weight"] = [1.0]
    return {
        "missing": ["Missing", "stem.weight", "blocks.1.up.bias"],
        "unexpected": ["Unexpected", "blocks.2.up.bias", "extra"],
        "shape": ["head.weight", "[4, 6]", "[3, 6]", "blocks.0.down.bias", "[7]", "[6]"],
        "no tensor": ["blocks.0.up.weight", "list"],
        "all": ["Missing", "stem.weight", "Unexpected", "extra", "head.weight", "[4, 6]", "[3, 6]"],
    }[how]


@each_form
@each_wrapping
@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "no tensor", "all"])
@ranks(2)
def test_checkpoint_that_does_not_fit(rank, world_size, use_orig_params, wrap, how):
    net = make_net()
    plain = copy.deepcopy(net)
    model = wrap(net, use_orig_params=use_orig_params)
    state = moved_on(plain)
    words = spoil(state, how)
    keys = list(state)
    with refused(model, RuntimeError, *words):
        model.load_state_dict(state)
    assert list(state) == keys
    assert_same_state(model, plain)
    assert_trains_like(plain, model)


@each_form
@pytest.mark.parametrize("how", ["shape", "no tensor"])
@ranks(2)
def test_checkpoint_that_does_not_fit_even_unstrictly(rank, world_size, use_orig_params, how):
    plain, model = plain_and_wrapped(use_orig_params)
    state = moved_on(plain)
    words = spoil(state, how)
    with refused(model, RuntimeError, *words):
        model.load_state_dict(state, strict=False)
    assert_trains_like(plain, model)


@each_form
@each_wrapping
@pytest.mark.parametrize("how", ["missing", "shape"])
@pytest.mark.parametrize("where", ["norm", "blocks.1.up"])
@ranks(2)
def test_checkpoint_and_a_module_that_loads_in_its_own_way(
    rank, world_size, use_orig_params, wrap, how, where
):
    net = make_net(Normed)
    plain = copy.deepcopy(net)
    model = wrap(net, use_orig_params=use_orig_params)
    state = moved_on(plain)
    name = f"{where}.weight"
    if how == "missing":
        del state[name]
    else:
        state[name] = torch.zeros(9)
    with refused(model, RuntimeError, name):
        model.load_state_dict(state)
    assert_same_state(model, plain)


@each_form
@ranks(2)
def test_message_about_a_checkpoint_has_clean_names_below_a_plain_module(rank, world_size, use_orig_params):
    parent = nn.Sequential(FSDP(make_net(), use_orig_params=use_orig_params))
    state = parent.state_dict()
    state["0.head.weight"] = torch.zeros(4, WIDTH)
    del state["0.stem.bias"]
    with pytest.raises(RuntimeError) as caught:
        parent.load_state_dict(state)
    assert "0.head.weight" in str(caught.value) and '"0.stem.bias"' in str(caught.value)
    assert "_fsdp_wrapped_module" not in str(caught.value)


@ranks(2)
def test_checkpoint_that_is_no_mapping(rank, world_size):
    net = make_net()
    plain = copy.deepcopy(net)
    model = per_block(net)
    with refused(model, TypeError, "state_dict", "list"):
        model.load_state_dict(list(plain.state_dict().items()))  # type: ignore[arg-type]
    assert_trains_like(plain, model)


@each_form
@ranks(2)
def test_loading_by_assignment(rank, world_size, use_orig_params):
    plain, model = plain_and_wrapped(use_orig_params)
    with refused(model, ValueError, "assign=True", "sharded parameters", "leave assign out"):
        model.load_state_dict(moved_on(plain), assign=True)
    assert_trains_like(plain, model)


# While it runs.


@each_form
@pytest.mark.parametrize("part", ["", "blocks.0"])
@ranks(2)
def test_forward_inside_summon(rank, world_size, use_orig_params, part):
    plain, model = plain_and_wrapped(use_orig_params)
    unit = f"unit '{part}'" if part else "the root unit (Net)"
    target = model.module.blocks[0] if part else model
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(0.9)
        with refused(model, RuntimeError, unit, "summon_full_params", "leave its context"):
            target(a_batch())
        assert {tuple(param.shape) for param in model.parameters()} >= {(3, WIDTH), (5, WIDTH)}
    assert_same_state(model, plain)
    assert_trains_like(plain, model)


@each_form
@ranks(2)
def test_backward_inside_summon(rank, world_size, use_orig_params):
    plain, model = plain_and_wrapped(use_orig_params)
    loss = model(a_batch()).square().mean()
    with FSDP.summon_full_params(model):
        with refused(model, RuntimeError, "summon_full_params", "leave its context"):
            loss.backward()
    assert_trains_like(plain, model)


@each_form
@pytest.mark.parametrize("part", ["", "blocks.1"])
@ranks(2)
def test_summon_inside_summon(rank, world_size, use_orig_params, part):
    plain, model = plain_and_wrapped(use_orig_params)
    target = model.module.blocks[1] if part else model
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(0.9)
        with refused(model, RuntimeError, "shown in full by", "another summon_full_params"):
            enter(FSDP.summon_full_params(target))
    assert_same_state(model, plain)
    assert_trains_like(plain, model)


@each_form
@each_wrapping
@ranks(2)
def test_backward_with_a_graph_of_its_own(rank, world_size, use_orig_params, wrap):
    net = make_net()
    plain = copy.deepcopy(net)
    model = wrap(net, use_orig_params=use_orig_params)
    before = fingerprint(model)
    loss = model(a_batch()).square().mean()
    with pytest.raises(RuntimeError) as caught:
        loss.backward(create_graph=True)
    for word in ("create_graph=True", "the root unit (Net)", "torch.autograd.grad"):
        assert word in str(caught.value)
    assert_same_state(model, plain)
    with torch.no_grad():
        model(a_batch())  # clears away what any failed backward leaves
    assert fingerprint(model) == before
    assert_trains_like(plain, model)


class OneGraph(nn.Module):
    """The gradient that comes first, of few bytes, has a graph with `create_graph`; the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (self.large * 1).sum(0)
        return x * self.small + large


@each_form
@ranks(2)
def test_one_gradient_with_a_graph_of_its_own(rank, world_size, use_orig_params):
    model = FSDP(OneGraph(), use_orig_params=use_orig_params)
    loss = model(torch.ones(2, 8, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)


def fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("in the backward")


@each_form
@each_wrapping
@ranks(2)
def test_gradients_can_be_zeroed_after_a_failed_backward(rank, world_size, use_orig_params, wrap):
    net = make_net()
    plain, part = copy.deepcopy(net), net.blocks[0].down
    model = wrap(net, use_orig_params=use_orig_params)
    model(a_batch()).square().mean().backward()
    hook = part.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError, match="in the backward"):
        model(a_batch()).square().mean().backward()
    hook.remove()
    model.zero_grad()
    batches = torch.randn(world_size, 4, WIDTH, dtype=torch.float64)
    for module, batch in ((model, batches[rank]), (plain, batches.flatten(0, 1))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(batch).square().mean().backward()
        optimizer.step()
    assert_same_state(model, plain)


@each_form
@pytest.mark.parametrize("forwards", [0, 1], ids=["before_the_first_forward", "after_it"])
@ranks(2)
def test_no_sync_on_a_nested_instance(rank, world_size, use_orig_params, forwards):
    plain, model = plain_and_wrapped(use_orig_params)
    for _ in range(forwards):
        model(a_batch())
    with refused(model, RuntimeError, "no_sync()", "root", "blocks.0"):
        enter(model.module.blocks[0].no_sync())
    with model.no_sync():
        pass
    assert_trains_like(plain, model)


# What would break the sharding.

MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to("meta"),
    "to with dtype": lambda model: model.to("meta", torch.float32),
    "to_empty": lambda model: model.to_empty(device="meta"),
}


@each_form
@each_wrapping
@pytest.mark.parametrize("how", list(MOVES))
@ranks(2)
def test_move_to_another_device(rank, world_size, use_orig_params, wrap, how):
    net = make_net()
    plain = copy.deepcopy(net)
    model = wrap(net, use_orig_params=use_orig_params)
    with refused(model, ValueError, "sharded parameters", "from cpu to meta", "before wrapping"):
        MOVES[how](model)
    assert_trains_like(plain, model)


@each_form
@each_wrapping
@ranks(2)
def test_conversion_while_parameters_are_in_use(rank, world_size, use_orig_params, wrap):
    net = make_net()
    plain = copy.deepcopy(net)
    model = wrap(net, use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        with refused(model, RuntimeError, "torch.float64 to torch.float16", "shown in full"):
            model.half()
    with model.no_sync():
        model(a_batch()).sum().backward()
    with refused(model, RuntimeError, "torch.float64 to torch.float32", "no_sync"):
        model.float()
    model.zero_grad()
    assert_trains_like(plain, model)


@each_form
@each_wrapping
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_conversion_between_forward_and_backward(rank, world_size, use_orig_params, wrap, strategy):
    net = make_net()
    plain = copy.deepcopy(net).float().double()
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    model = wrap(net, **options)
    loss = model(a_batch()).sum()
    model.float()
    model(a_batch().float())
    with pytest.raises(RuntimeError, match="were converted to another dtype between forward and backward"):
        loss.backward()
    model.double()
    assert_trains_like(plain, model)


@each_form
@ranks(2)
def test_conversion_that_changes_nothing_is_fine(rank, world_size, use_orig_params):
    plain, model = plain_and_wrapped(use_orig_params)
    assert model.to("cpu").double().cpu() is model
    assert_trains_like(plain, model)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "pickle.dumps": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@each_form
@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("inside", [False, True], ids=["wrapper", "plain_parent"])
@ranks(2)
def test_copies_of_a_wrapped_module(rank, world_size, use_orig_params, how, inside):
    plain, model = plain_and_wrapped(use_orig_params)
    target = nn.Sequential(model) if inside else model
    with refused(target, TypeError, "wrapped module", "process group", "state_dict()", "copy.deepcopy"):
        COPIES[how](target)
    assert_trains_like(plain, model)
