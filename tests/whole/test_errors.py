"""Bad input: a clear error before anything changes, and a model that is as usable as before."""

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bed import ranks
from bed.scripts import python
from fronts import either_front, shard
from fsdp_wrap import (
    BackwardPrefetch,
    ShardingStrategy,
    fully_shard,
    iter_full_params,
    param_aliases,
    replicate,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy, NameWrapPolicy
from nets import WIDTH, Block, Net
from state_nets import assert_close

HYBRID = ShardingStrategy.HYBRID_SHARD


def per_block(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, **{"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True, **options})


WAYS: list[Callable[..., FSDP]] = [partial(FSDP, use_orig_params=False), per_block]
"""One unit of all in the flat form; and a unit for each block in the other form."""


def both(cls: type[nn.Module] = Net, **options: Any) -> Iterator[tuple[nn.Module, FSDP]]:
    """A plain model and a wrapped one with the same parameters, for each way to wrap."""
    for wrap in WAYS:
        net = cls().double()
        yield copy.deepcopy(net), wrap(net, **options)


def facts(tensor: torch.Tensor) -> list[Any]:
    values, grad = (
        None if part is None or part.is_meta else part.flatten().tolist()
        for part in (tensor.detach(), tensor.grad)
    )
    hooks, about = len(tensor._backward_hooks or ()), (tensor.dtype, tensor.device, tensor.shape)
    return [id(tensor), about, tensor.requires_grad, hooks, sorted(vars(tensor)), values, grad]


def fingerprint(module: nn.Module) -> list[Any]:
    """All that a refused call could have changed: the tree, the tensors, their values and attributes."""
    tree = [
        (name, id(child), sorted(vars(child)), child.training)
        for name, child in module.named_modules(remove_duplicate=False)
    ]
    named = (module.named_parameters, module.named_buffers)
    return tree + [(name, facts(tensor)) for find in named for name, tensor in find(remove_duplicate=False)]


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
    assert_close(model.state_dict(), plain.state_dict())


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


@ranks(1)
def test_what_is_no_module_and_what_has_no_forward(rank, world_size):
    for what, named in ((3, "int"), (print, "builtin"), (nn.Linear, "type"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"torch\.nn\.Module, not .*{named}"):
            FSDP(what)  # type: ignore[arg-type]
        for take in (iter_full_params, param_aliases, set_gradients_in_place):
            with pytest.raises(TypeError, match=rf"torch\.nn\.Module, not a .*{named}"):
                enter(take(what))  # type: ignore[arg-type]
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"one": nn.Linear(2, 2)})):
        with pytest.warns(UserWarning, match="a Module.* has no forward") as caught:
            FSDP(container)
        assert caught[0].filename == __file__


@ranks(2)
def test_what_is_wrapped_is_not_wrapped_again(rank, world_size):
    net = Net().double()
    plain, model = copy.deepcopy(net), FSDP(net)
    for again, cure in ((model, "wrap a module once"), (net, "wrap parts before")):
        with refused(model, ValueError, "already wrapped", "Net", cure):
            FSDP(again)
    with refused(model, ValueError, "already", "Block"):
        FSDP(net.blocks[0])
    assert_trains_like(plain, model)

    net = copy.deepcopy(plain)
    net.blocks[1] = FSDP(net.blocks[1])
    with refused(net, ValueError, "'blocks.1'", "by the policy too", "by hand"):
        per_block(net)
    for argument in ("ignored_modules", "ignored_states"):
        with refused(net, ValueError, argument, "FullyShardedDataParallel that is sharded already"):
            FSDP(net, **{argument: [net.blocks[1]]})  # type: ignore[arg-type]
    assert_trains_like(plain, FSDP(net))


class Special(nn.Parameter):
    pass


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].register_buffer("offset", torch.zeros(WIDTH))


def put(net: nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces a tensor of the second block by what is made of it."""
    path, _, attribute = f"blocks.1.{name}".rpartition(".")
    owner = net.get_submodule(path)
    setattr(owner, attribute, make(getattr(owner, attribute).detach()))


def meta_parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.to("meta"))


HOOKED = "'blocks.1.up.weight' hook remove"
SPOILT: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (
        lambda net: put(net, "scale", meta_parameter),
        ValueError,
        "'blocks.1.scale' meta Block reset_parameters param_init_fn to_empty",
    ),
    (lambda net: put(net, "offset", lambda value: value.to("meta")), ValueError, "blocks.1.offset' meta"),
    (
        lambda net: put(net, "up.bias", Special),
        TypeError,
        "'blocks.1.up.bias' Special ignored_states torch.nn.Parameter",
    ),
    (lambda net: net.blocks[1].up.weight.register_hook(print), ValueError, HOOKED),
    (lambda net: net.blocks[1].up.weight.register_post_accumulate_grad_hook(print), ValueError, HOOKED),
]


@ranks(2)
def test_tensors_that_cannot_be_sharded(rank, world_size):
    for wrap, (spoil, error, words) in itertools.product(WAYS, SPOILT):
        net = More().double()
        spoil(net)
        for device_id in (None, torch.device("cpu")):
            with refused(net, error, *words.split()):
                wrap(net, device_id=device_id)


@ranks(3)
def test_first_rank_with_nothing_to_send(rank, world_size):
    """Only it can tell, and no rank waits for it."""
    for wrap, what in itertools.product(WAYS, ("meta", "subclass")):
        net = More().double()
        if rank == 0:
            put(net, "scale", meta_parameter if what == "meta" else Special)
        error = TypeError if rank == 0 and what == "subclass" else ValueError
        words = ["'blocks.1.scale'"] if rank == 0 else ["'blocks.1.scale'", "nothing was wrapped", "rank 0"]
        with refused(net, error, *words):
            wrap(net, sync_module_states=True)
        net, plain = More().double(), More().double()
        states = [net.state_dict()]
        dist.broadcast_object_list(states)
        plain.load_state_dict(states[0])
        assert_trains_like(plain, wrap(net, sync_module_states=True))


@ranks(4)
def test_groups_of_other_ranks(rank, world_size):
    halves, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    shard, replicate = ([dist.new_group(members) for members in lists] for lists in (halves, columns))
    meshes = [DeviceMesh("cpu", members) for members in halves]
    own = rank // 2
    pair = (shard[own], replicate[rank % 2])
    wrong_pairs = [(shard[1 - own], pair[1]), (pair[0], replicate[1 - rank % 2])]
    for right, wrong, members, options in (
        ({"process_group": shard[own]}, [shard[1 - own]], halves[own], {}),
        ({"device_mesh": meshes[own]}, [meshes[1 - own]], halves[own], {}),
        ({"process_group": pair}, wrong_pairs, None, {"sharding_strategy": HYBRID}),
    ):
        (kind,) = right
        net = Net().double()
        plain = copy.deepcopy(net)
        for other in wrong:
            with refused(net, ValueError, f"rank {rank} is not part of", kind):
                per_block(net, **{kind: other}, **options)
        assert_trains_like(plain, per_block(net, **right, **options), members)


@ranks(4)
def test_ranks_to_shard_over_stand_in_a_mesh_as_in_its_groups(rank, world_size):
    """Torch sorts the ranks of a group, and not those of its mesh; replicas may stand in any order."""
    line, square = DeviceMesh("cpu", [3, 2, 1, 0]), DeviceMesh("cpu", [[3, 1], [2, 0]])
    crossed, half = DeviceMesh("cpu", [[1, 3], [0, 2]]), DeviceMesh("cpu", [[0, 1], [3, 2]])
    wrong = [
        lambda net: per_block(net, device_mesh=line),
        lambda net: per_block(net, device_mesh=square, sharding_strategy=HYBRID),
        lambda net: fully_shard(net, mesh=line),
        lambda net: fully_shard(net, mesh=square),
        lambda net: per_block(net, device_mesh=half, sharding_strategy=HYBRID),
        lambda net: fully_shard(net, mesh=half),
    ]
    for number, wrap in enumerate(wrong):
        net = Net().double()
        order = [3, 2] if number > 3 else [[3, 2, 1, 0], [3, 1] if rank % 2 else [2, 0]][number % 2]
        with refused(net, ValueError, f"the ranks {order} to", f"has them as {sorted(order)}"):
            wrap(net)
    replicated = {"device_mesh": line, "sharding_strategy": ShardingStrategy.NO_SHARD}
    for options in (replicated, {"device_mesh": crossed, "sharding_strategy": HYBRID}):
        net = Net().double()
        plain = copy.deepcopy(net)
        assert_trains_like(plain, per_block(net, **options))
    fully_shard(Net(), mesh=crossed)
    replicate(Net(), mesh=line)


@ranks(4)
def test_groups_to_replicate_over_hold_one_part(rank, world_size):
    halves, crossing = (
        [dist.new_group(members) for members in lists] for lists in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    )
    pair = halves[rank // 2], crossing[rank in (1, 2)]
    model = per_block(Net().double(), process_group=pair, sharding_strategy=HYBRID)
    with pytest.raises(RuntimeError, match="place . of 2 in its group to shard over where rank"):
        model(a_batch()).sum().backward()


@ranks(2)
def test_groups_and_strategy_must_go_together(rank, world_size):
    pair = (dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True))
    for kind, one, two in (
        ("process_group", pair[0], pair),
        ("device_mesh", init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))),
    ):
        net = Net().double()
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            with refused(net, ValueError, f"{strategy} takes one process group", "HYBRID_SHARD"):
                per_block(net, sharding_strategy=ShardingStrategy[strategy], **{kind: two})
        with refused(net, ValueError, "HYBRID_SHARD", "pair", "two dimensions"):
            per_block(net, sharding_strategy=HYBRID, **{kind: one})
        plain = copy.deepcopy(net)
        assert_trains_like(plain, per_block(net, sharding_strategy=HYBRID, **{kind: two}))


def overriding(name: str, value: Any) -> CustomPolicy:
    """A policy that has the last of what it chooses wrapped with another argument."""

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {name: value} if getattr(module, "out_features", 0) == 3 else isinstance(module, Block)

    return CustomPolicy(choose)


WRONG_TYPES: dict[str, list[Any]] = {
    "sharding_strategy": ["FULL_SHARD", 1, BackwardPrefetch.BACKWARD_PRE],
    "backward_prefetch": ["BACKWARD_PRE", True],
    "ignored_modules": [nn.Linear(1, 1), 3],
    "ignored_states": [nn.Linear(1, 1), 3],
    "process_group": ["gloo", 0],
    "device_mesh": ["cpu", [0, 1]],
    "cpu_offload": [True],
    "auto_wrap_policy ModuleWrapPolicy": [{Block}, "Block"],
}
WRONG_OVERRIDES = {
    "sharding_strategy": "ZERO3",
    "mixed_precision": torch.bfloat16,
    "process_group": "gloo",
    "strategy": ShardingStrategy.FULL_SHARD,
}
PRESENT = ["did you mean 'Block'?", "Block (2)", "Linear (6)", "ModuleList (1)", "Net (1)"]
WRONG_VALUES: list[tuple[Callable[[Any], dict[str, Any]], list[str]]] = [
    (lambda net: {"ignored_modules": ["head"]}, ["ignored_modules", "objects only, found"]),
    (lambda net: {"ignored_modules": [net.head.weight]}, ["ignored_modules", "objects only, found"]),
    (lambda net: {"ignored_states": net.head.weight.shape}, ["ignored_states", "objects only, found"]),
    (lambda net: {"ignored_states": ["head.weight"]}, ["ignored_states", "objects only, found"]),
    (
        lambda net: {"ignored_modules": [net.head], "ignored_states": [net.stem.weight]},
        ["ignored_modules", "ignored_states", "exclude each other"],
    ),
    (
        lambda net: {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))},
        ["process_group", "device_mesh", "one of them"],
    ),
    (lambda net: {"param_init_fn": "reset"}, ["param_init_fn", "callable with a module", "'reset'"]),
    (
        lambda net: {"auto_wrap_policy": NameWrapPolicy(["Blok", "encoder.Layer"])},
        ["'Blok'", "'encoder.Layer'", *PRESENT],
    ),
]


@ranks(2)
def test_wrong_arguments(rank, world_size):
    net = Net().double()
    for words, values in WRONG_TYPES.items():
        for value in values:
            with refused(net, TypeError, *words.split()):
                per_block(net, **{words.split()[0]: value})
    for name, value in WRONG_OVERRIDES.items():
        with refused(net, TypeError, name):
            FSDP(net, auto_wrap_policy=overriding(name, value))
    for options, said in WRONG_VALUES:
        with refused(net, ValueError, *said):
            per_block(net, **options(net))
    plain = copy.deepcopy(net)
    assert_trains_like(plain, FSDP(net, auto_wrap_policy=NameWrapPolicy("Block")))


def moved_on(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in module.state_dict().items()}


PAIR = torch.zeros(2)
UNFIT: list[tuple[list[str], dict[str, Any], list[str], bool]] = [
    (["stem.weight", "blocks.1.up.bias"], {}, ["Missing", "stem.weight", "blocks.1.up.bias"], False),
    ([], {"blocks.2.up.bias": PAIR, "extra": PAIR}, ["Unexpected", "blocks.2.up.bias", "extra"], False),
    (
        [],
        {"head.weight": torch.zeros(4, WIDTH), "blocks.0.down.bias": torch.zeros(WIDTH + 1)},
        ["head.weight", "[4, 6]", "[3, 6]", "blocks.0.down.bias", "[7]", "[6]"],
        True,
    ),
    ([], {"blocks.0.up.weight": [1.0]}, ["blocks.0.up.weight", "list"], True),
    (
        ["stem.weight"],
        {"extra": PAIR, "head.weight": torch.zeros(4, WIDTH)},
        ["Missing", "stem.weight", "Unexpected", "extra", "head.weight", "[4, 6]", "[3, 6]"],
        False,
    ),
]
"""What is taken out, what is put in, what the error says, and whether it is one even where not strict."""


@ranks(2)
def test_checkpoint_that_does_not_fit(rank, world_size):
    for plain, model in both():
        for absent, there, words, always in UNFIT:
            state = {name: value for name, value in moved_on(plain).items() if name not in absent} | there
            keys = list(state)
            for strict in (True, False) if always else (True,):
                with refused(model, RuntimeError, *words):
                    model.load_state_dict(state, strict=strict)
            assert list(state) == keys
            assert_same_state(model, plain)
        with refused(model, TypeError, "state_dict", "list"):
            model.load_state_dict(list(plain.state_dict().items()))  # type: ignore[arg-type]
        with refused(model, ValueError, "assign=True", "sharded parameters", "leave assign out"):
            model.load_state_dict(moved_on(plain), assign=True)
        assert_trains_like(plain, model)


@ranks(2)
def test_what_is_refused_while_parameters_are_summoned(rank, world_size):
    for use_orig_params in (False, True):
        net = Net().double()
        plain, model = copy.deepcopy(net), per_block(net, use_orig_params=use_orig_params)
        block = model.module.blocks[0]
        loss = model(a_batch()).square().mean()
        with FSDP.summon_full_params(model):
            with refused(model, RuntimeError, "summon_full_params", "leave its context"):
                loss.backward()
        assert_trains_like(plain, model)
        with FSDP.summon_full_params(model):
            with torch.no_grad():
                for param in (*model.parameters(), *plain.parameters()):
                    param.mul_(0.9)
            for target, unit in ((model, "the root unit (Net)"), (block, "unit 'blocks.0'")):
                with refused(model, RuntimeError, unit, "summon_full_params", "leave its context"):
                    target(a_batch())
                with refused(model, RuntimeError, "shown in full by", "another summon_full_params"):
                    enter(FSDP.summon_full_params(target))
            assert {tuple(param.shape) for param in model.parameters()} >= {(3, WIDTH), (5, WIDTH)}
        assert_same_state(model, plain)
        assert_trains_like(plain, model)


class OneGraph(nn.Module):
    """The gradient that comes first, of few bytes, has a graph with `create_graph`; the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (self.large * 1).sum(0)
        return x * self.small + large


@ranks(2)
def test_backward_with_a_graph_of_its_own(rank, world_size):
    for plain, model in both():
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
    for use_orig_params in (False, True):
        model = FSDP(OneGraph(), use_orig_params=use_orig_params)
        loss = model(torch.ones(2, 8, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            loss.backward(create_graph=True)


@ranks(2)
def test_no_sync_on_a_nested_instance(rank, world_size):
    net = Net().double()
    plain, model = copy.deepcopy(net), per_block(net)
    for _ in range(2):  # before the first forward, and after it
        with refused(model, RuntimeError, "no_sync()", "root", "blocks.0"):
            enter(model.module.blocks[0].no_sync())
        with model.no_sync():
            pass
        model(a_batch())
    assert_trains_like(plain, model)


@ranks(2)
def test_moves_and_conversions(rank, world_size):
    for plain, model in both():
        for move in (
            lambda: model.to("meta"),  # noqa: B023
            lambda: model.to("meta", torch.float32),  # noqa: B023
            lambda: model.to_empty(device="meta"),  # noqa: B023
        ):
            with refused(model, ValueError, "sharded parameters", "from cpu to meta", "before wrapping"):
                move()
        with FSDP.summon_full_params(model):
            with refused(model, RuntimeError, "torch.float64 to torch.float16", "shown in full"):
                model.half()
        with model.no_sync():
            model(a_batch()).sum().backward()
        with refused(model, RuntimeError, "torch.float64 to torch.float32", "no_sync"):
            model.float()
        model.zero_grad()
        assert model.to("cpu").double().cpu() is model, "what changes nothing is fine"
        assert_trains_like(plain, model)


@ranks(2)
def test_conversion_between_forward_and_backward(rank, world_size):
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for plain, model in both(sharding_strategy=ShardingStrategy[strategy]):
            plain.float().double()
            loss = model(a_batch()).sum()
            model.float()
            model(a_batch().float())
            with pytest.raises(RuntimeError, match="converted to another dtype between forward and backward"):
                loss.backward()
            model.double()
            assert_trains_like(plain, model)


@ranks(2)
def test_pickling_says_what_to_do_instead(rank, world_size):
    words = ("wrapped module", "process group", "state_dict()", "copy.deepcopy")
    for plain, model in both():
        for target in (model, nn.Sequential(model)):
            for save in (pickle.dumps, lambda saved: torch.save(saved, io.BytesIO())):
                with refused(target, TypeError, *words):
                    save(target)
        assert_trains_like(plain, model)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@either_front
@ranks(2)
def test_shared_memory_is_a_flag(rank, world_size, front):
    for wrong in ("yes", 1, "0"):
        model = net()
        with pytest.raises(TypeError, match=f"shared_memory must be True, False or None.*not {wrong!r}"):
            shard(front, model, shared_memory=wrong)
        assert [param.numel() for param in model.parameters()] == [16, 4, 8, 2]
    for right in (None, True, False):
        shard(front, net(), shared_memory=right)(torch.ones(1, 4)).sum().backward()


@ranks(2)
def test_a_policy_that_matches_nothing_warns(rank, world_size):
    told = r"no module is an instance of .*Conv2d, .*classes present.*Linear \(2\)"
    with pytest.warns(UserWarning, match=told):
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))
    with pytest.warns(UserWarning, match="no module is an instance of no class at all"):
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy(set()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for matching in ({nn.Linear}, {nn.Sequential}):  # also the root alone
            FSDP(net(), auto_wrap_policy=ModuleWrapPolicy(matching))
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU, nn.Conv2d}))


@either_front
@ranks(2)
def test_lazy_modules_are_to_run_once(rank, world_size, front):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'1.weight' .*lazy.* no shape yet; run one forward"):
        shard(front, model)
    model(torch.ones(2, 4))
    shard(front, model)(torch.ones(2, 4)).sum().backward()
    ignoring = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    FSDP(ignoring, ignored_modules=[ignoring[1]], use_orig_params=True)


ENDS_WITH_MODELS = """
import torch, torch.distributed as dist
from torch import nn
from fsdp_wrap import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapped = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), use_orig_params=True)
sharded = fully_shard(nn.Sequential(nn.Linear(2, 2)))
for model in (wrapped, sharded):
    model(torch.ones(1, 2)).sum().backward()
"""


def test_a_program_that_ends_with_its_models_prints_nothing():
    """The interpreter lets go of modules last, when much of the package has gone."""
    assert python("-W", "ignore", "-c", ENDS_WITH_MODELS).err == ""
