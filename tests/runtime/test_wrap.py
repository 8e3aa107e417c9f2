"""Auto-wrap policies and the planning of nested units.

References: torch's own policies run by torch's own rewriting, and for tied parameters a listing of all
paths through the module tree.
"""

import copy
import functools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_checkpoint
from torch.distributed.fsdp import _wrap_utils as torch_wrap_utils
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_wrap import wrap as our_wrap
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy, NameWrapPolicy, enable_wrap, plan_wrapping, wrap

PREFIX = "_fsdp_wrapped_module"


class Unit(nn.Module):
    """Stands in for the wrapper class."""

    def __init__(self, module: nn.Module, tag: str = "root", size: int | None = None) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.tag, self.size = tag, size

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x))


class SpecialBlock(Block):
    pass


class Outer:
    class Block(Block):
        pass


class Model(nn.Module):
    """Containers, repeated classes, a parameter of its own, an empty slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(4), Block(4), SpecialBlock(4)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Sequential(nn.Linear(4, 30), nn.ReLU())})
        self.scale = nn.Parameter(torch.ones(4))
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.register_module("absent", None)


class Uses(nn.Module):
    """Holds the given children and parameters, which may be held elsewhere too."""

    def __init__(self, **held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


def clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != PREFIX)


def unit_names(root: nn.Module) -> set[str]:
    return {clean(name) for name, module in root.named_modules() if isinstance(module, Unit)}


def make_unit(module, kwargs, left_to_ancestor) -> Unit:
    return Unit(module, **kwargs)


def rewrite(root: nn.Module, policy, **options) -> nn.Module:
    plan_wrapping(root, policy, Unit, **options).apply(make_unit)
    return root


def torch_rewrite(root: nn.Module, policy, ignored_modules=(), ignored_params=()) -> nn.Module:
    if isinstance(policy, torch_wrap._Policy):
        targets = policy._run_policy(root, set(ignored_modules), {})
        fn = torch_wrap_utils._construct_wrap_fn(root, targets, Unit)
        torch_wrap_utils._post_order_apply(root, fn)
    else:
        torch_wrap._recursive_wrap(
            root, policy, Unit, set(ignored_modules), set(ignored_params), only_wrap_children=True
        )
    return root


def snapshot(root: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]


def random_tree(rng: random.Random, depth: int = 4) -> nn.Module:
    """A tree without containers (on those we deviate from torch) and without sharing."""
    if depth == 0 or rng.random() < 0.25:
        return rng.choice([lambda: nn.Linear(rng.randint(1, 9), rng.randint(1, 9)), nn.ReLU, Block])()
    if rng.random() < 0.15:
        return nn.MultiheadAttention(4, 2)
    children = [random_tree(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    return nn.Sequential(*children)


def over_twenty(module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel > 20


def policies_of(lib) -> dict[str, object]:
    size = functools.partial(lib.size_based_auto_wrap_policy, min_num_params=60)
    linears = functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))
    return {
        "always": lib.always_wrap_policy,
        "lambda": linears,
        "transformer": functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": size,
        "size_small": functools.partial(lib.size_based_auto_wrap_policy, min_num_params=12),
        "size_leaf": functools.partial(size, force_leaf_modules={Block}, min_num_params=1),
        "size_excluded": functools.partial(
            size, exclude_wrap_modules={nn.Linear, nn.ModuleList, nn.ModuleDict}
        ),
        "or": functools.partial(lib._or_policy, policies=[size, linears]),
        "user": over_twenty,
        "module_as_function": functools.partial(lib.ModuleWrapPolicy({Block, nn.ReLU}).__call__),
        "module": lib.ModuleWrapPolicy({Block, nn.ReLU}),
        "module_list": lib.ModuleWrapPolicy([nn.Linear, nn.Embedding, nn.MultiheadAttention]),
        "custom": lib.CustomPolicy(
            lambda m: {"tag": "x"} if isinstance(m, Block) else isinstance(m, nn.Linear)
        ),
    }


@pytest.mark.parametrize("name", list(policies_of(our_wrap)))
def test_random_trees_are_wrapped_as_torch_wraps_them(name):
    units = differs = 0
    for seed in range(12):
        rng = random.Random(seed)
        tree = nn.Sequential(*(random_tree(rng) for _ in range(3)))
        other, reference, whole = (copy.deepcopy(tree) for _ in range(3))
        expected = unit_names(torch_rewrite(whole, policies_of(torch_wrap)[name]))
        assert unit_names(rewrite(other, policies_of(our_wrap)[name])) == expected, seed
        picked = rng.sample([n for n, _ in tree.named_modules() if n], 2)
        theirs = {m for n in picked for m in reference.get_submodule(n).modules()}
        their_params = {p for m in theirs for p in m.parameters()}
        torch_rewrite(reference, policies_of(torch_wrap)[name], theirs, their_params)
        # Ours are given without what lies below them, and without their parameters.
        ours = {tree.get_submodule(n) for n in picked}
        rewrite(tree, policies_of(our_wrap)[name], ignored_modules=ours)
        assert unit_names(tree) == unit_names(reference), f"{seed}: with ignored modules"
        units += len(expected)
        differs += unit_names(reference) != expected
    assert units > 12, "the trees do not exercise the policy"
    assert differs, "ignoring never changed anything"


def test_only_containers_without_a_forward_are_left_out():
    class Stack(nn.ModuleList):
        def forward(self, x):
            return x

    expected = unit_names(torch_rewrite(Model(), torch_wrap.always_wrap_policy))
    assert unit_names(rewrite(Model(), our_wrap.always_wrap_policy)) == expected - {
        "layers",
        "heads",
        "extra",
    }
    root = Uses(stack=Stack([nn.Linear(1, 1)]), plain=nn.ModuleList([nn.Linear(1, 1)]))
    assert unit_names(rewrite(root, our_wrap.always_wrap_policy)) == {"stack", "stack.0", "plain.0"}
    named = Model()
    with pytest.warns(UserWarning, match=r"'layers' \(ModuleList\) has no forward"):
        rewrite(named, ModuleWrapPolicy({nn.ModuleList, SpecialBlock}))
    assert unit_names(named) == {"layers.2"}


def test_policies_of_torch_are_accepted_and_torch_accepts_ours():
    for theirs in (torch_wrap.ModuleWrapPolicy({Block}), torch_wrap.CustomPolicy(lambda m: True)):
        expected = unit_names(torch_rewrite(nn.Sequential(Block(), nn.Linear(2, 2)), theirs))
        assert unit_names(rewrite(nn.Sequential(Block(), nn.Linear(2, 2)), theirs)) == expected != set()
    policies: list[Any] = [
        ModuleWrapPolicy({Block}),
        NameWrapPolicy(["Block", "SpecialBlock"]),
        CustomPolicy(lambda m: isinstance(m, Block)),
        functools.partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    ]
    for policy in policies:
        model = Model()
        torch_checkpoint.apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert all(isinstance(layer, torch_checkpoint.CheckpointWrapper) for layer in model.layers), policy
        assert isinstance(model.heads["a"], nn.Linear), policy


def test_shared_module_is_asked_about_once_and_becomes_one_unit_in_every_place():
    asked = []

    def spy(module, recurse, nonwrapped_numel):
        asked.append((module, recurse))
        return True

    for policy in (spy, ModuleWrapPolicy({nn.Linear})):
        shared = nn.Linear(2, 2)
        root = Uses(a=Uses(x=shared, y=shared), b=Uses(deep=Uses(x=shared)), c=shared)
        rewrite(root, policy)
        places = root.named_modules(remove_duplicate=False)
        units = [module for name, module in places if name.split(".")[-1] in ("x", "y", "c")]
        assert len(units) == 4 and {*units} == {root.c}
        assert isinstance(root.c, Unit) and root.c._fsdp_wrapped_module is shared
        if policy is spy:
            assert sorted(recurse for module, recurse in asked if module is shared) == [False, True]


def test_sizes_count_what_is_left_and_their_defaults_are_attributes_of_the_function(monkeypatch):
    policy = our_wrap.size_based_auto_wrap_policy
    assert policy.FORCE_LEAF_MODULES == torch_wrap.size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    assert policy.EXCLUDE_WRAP_MODULES == torch_wrap.size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert not policy(Block(), False, int(1e8) - 1)
    assert policy(Block(), False, int(1e8))
    monkeypatch.setattr(policy, "EXCLUDE_WRAP_MODULES", {Block})
    monkeypatch.setattr(policy, "FORCE_LEAF_MODULES", {nn.Linear})
    assert not policy(Block(), False, int(1e8))
    assert policy(Block(), True, int(1e8))
    assert not policy(nn.Linear(1, 1), True, int(1e8))
    monkeypatch.undo()

    model, reference = Model(), Model()
    of_forty = functools.partial(policy, min_num_params=40)
    torch_rewrite(reference, of_forty, ignored_params={reference.embed.weight})
    rewrite(model, of_forty, ignored_params=[model.embed.weight])
    assert unit_names(model) == unit_names(reference) == unit_names(rewrite(Model(), of_forty)) - {"embed"}
    embed, head = nn.Embedding(10, 5), nn.Linear(5, 10, bias=False)
    head.weight = embed.weight
    root = nn.Sequential(nn.Sequential(embed, nn.Linear(5, 5, bias=False), head), nn.Linear(60, 1))
    plan = plan_wrapping(root, functools.partial(policy, min_num_params=50), Unit)
    assert list(plan.targets) == [root[0], root[1]], "a tied one counts only where all its uses are"
    assert plan.owners == {}


class Identical(our_wrap._Policy):
    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        return dict.fromkeys(root_module.modules(), root_kwargs)


def test_each_unit_has_arguments_of_its_own_which_policies_may_override():
    answers: dict[str, Any] = {"up": {"tag": "up"}, "down": True, "other": False, "empty": {}}
    root = Uses(**{name: nn.Linear(1, 1) for name in answers})
    by_module = {root.get_submodule(name): answer for name, answer in answers.items()}
    defaults = {"tag": "default", "size": 3}
    rewrite(root, CustomPolicy(lambda m: by_module.get(m, False)), wrapper_kwargs=defaults)
    assert unit_names(root) == {"up", "down"}
    assert (root.up.tag, root.up.size) == ("up", 3)
    assert (root.down.tag, root.down.size) == ("default", 3)
    assert defaults == {"tag": "default", "size": 3}
    for policy in (our_wrap.always_wrap_policy, ModuleWrapPolicy({nn.Linear}), Identical()):
        first, second = plan_wrapping(Block(), policy, Unit, wrapper_kwargs={"tag": "t"}).targets.values()
        assert first == second == {"tag": "t"} and first is not second


def test_ignored_modules_are_not_wrapped_though_the_policy_names_them():
    for policy in (ModuleWrapPolicy({Block}), NameWrapPolicy("Block"), CustomPolicy(lambda m: True)):
        root = nn.Sequential(Block(), Block())
        chosen = policy._run_policy(root, {root[0]}, {})
        assert root[1] in chosen
        assert root[0] not in chosen
    plan = plan_wrapping(root, Identical(), Unit, ignored_modules=[root[0]])
    assert list(plan.targets) == [root[1].up, root[1].down, root[1]]
    model = Model()
    ignored = model.layers[1] = Unit(model.layers[1])
    rewrite(model, ModuleWrapPolicy({Block}), ignored_modules=[ignored])
    assert model.layers[1] is ignored, "also where it is wrapped already"
    assert unit_names(model) == {"layers.0", "layers.1", "layers.2"}


def raises_midway(module, recurse, nonwrapped_numel):
    if isinstance(module, SpecialBlock):
        raise RuntimeError("midway")
    return True


def test_bad_policies_and_what_is_wrapped_already_are_refused_and_nothing_changes():
    asked: list[Any] = []
    policies: list[tuple[Any, type[Exception], str]] = [
        (CustomPolicy(lambda m: type(m) is not SpecialBlock or 1), ValueError, r"1 for 'layers.2' \(Special"),  # type: ignore[arg-type, return-value]
        (CustomPolicy(lambda m: None), ValueError, r"None for the root module \(Model\)"),  # type: ignore[arg-type, return-value]
        (CustomPolicy(lambda m: {"tga": 1} if type(m) is Block else False), TypeError, "'layers.0'.*tga"),
        (raises_midway, RuntimeError, "midway"),
        (NameWrapPolicy("Nothing"), ValueError, "no module has a class named 'Nothing'"),
        ({Block}, TypeError, r"write ModuleWrapPolicy\(\{Block\}\)"),
        (None, TypeError, "must be a policy object or a function"),
        (lambda **given: asked.append(given), ValueError, r"'layers.1' \(Unit\) is one"),
    ]
    model = Model()
    for policy, error, message in policies:
        if "Unit" in message:
            model.layers[1] = Unit(model.layers[1])
        before = snapshot(model)
        with pytest.raises(error, match=message):
            rewrite(model, policy)
        assert snapshot(model) == before, message
    assert asked == []
    with pytest.raises(ValueError, match=r"the root module \(Unit\) is one"):
        rewrite(Unit(Block()), our_wrap.always_wrap_policy)


def test_names_match_whole_parts_of_a_class_path():
    for names, expected in (
        ("Block", {"block", "outer"}),
        ("Outer.Block", {"outer"}),
        (f"{__name__}.Block", {"block"}),
        (f"{__name__}.Outer.Block", {"outer"}),
        (["SpecialBlock", "activation.ReLU"], {"special", "relu"}),
    ):
        root = Uses(block=Block(), special=SpecialBlock(), outer=Outer.Block(), relu=nn.ReLU())
        assert unit_names(rewrite(root, NameWrapPolicy(names))) == expected
    renamed = type("Made", (Block,), {"__qualname__": "Renamed"})
    for name in ("Made", "Renamed"):
        assert unit_names(rewrite(Uses(x=renamed()), NameWrapPolicy(name))) == {"x"}
    for name in ("lock", "uter.Block", "block", "Block.up", f"x.{__name__}.Block", "Uses.Block"):
        with pytest.raises(ValueError, match="no module has a class named"):
            plan_wrapping(Uses(block=Block(), outer=Outer.Block()), NameWrapPolicy(name), Unit)


def test_name_that_matches_nothing_is_answered_with_what_there_is():
    with pytest.raises(ValueError) as error:
        plan_wrapping(Model(), NameWrapPolicy(["some.where.SpecialBlok", "Zzz"]), Unit)
    assert str(error.value) == (
        "NameWrapPolicy: no module has a class named 'some.where.SpecialBlok', 'Zzz' (did you mean "
        "'SpecialBlock'?); the classes present, with their counts, are: Block (2), Embedding (1), "
        "Linear (8), Model (1), ModuleDict (1), ModuleList (1), ParameterList (1), ReLU (1), "
        "Sequential (1), SpecialBlock (1)"
    )
    with pytest.raises(ValueError) as error:
        plan_wrapping(Block(), NameWrapPolicy("Zzz"), Unit)
    assert "did you mean" not in str(error.value)
    model = Model()
    with pytest.warns(UserWarning, match=r"named 'Blokc' \(did you mean 'Block'\?\)"):
        rewrite(model, NameWrapPolicy(("Blokc", "Embedding")))
    assert unit_names(model) == {"embed"}, "one name of several is enough"
    assert not plan_wrapping(Block(), NameWrapPolicy("Block"), Unit).targets, "the root is never wrapped"
    model = Model()
    assert not plan_wrapping(model, NameWrapPolicy("Embedding"), Unit, ignored_modules=[model.embed]).targets
    plan_wrapping(model, NameWrapPolicy("Embedding"), lambda module: Unit(module)).apply(make_unit)
    assert unit_names(model) == {"embed"}, "by a function in place of a class"


def test_policies_hold_and_show_names_or_classes():
    wrong: list[Any] = ["", [], [""], [Block]]
    for names in wrong:
        with pytest.raises(ValueError, match="one or more names"):
            NameWrapPolicy(names)
    with pytest.raises(TypeError, match="NameWrapPolicy takes the names"):
        ModuleWrapPolicy(["Block"])  # type: ignore[list-item]
    policy = ModuleWrapPolicy([nn.Linear, Block, Block])
    assert policy._module_classes == {nn.Linear, Block}
    assert repr(policy) == f"ModuleWrapPolicy({{{__name__}.Block, torch.nn.modules.linear.Linear}})"
    assert repr(NameWrapPolicy("Block")) == "NameWrapPolicy(['Block'])"


class Layered(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = wrap(Layered(depth - 1) if depth else nn.Linear(1, 1))


def test_inner_enable_wrap_alone_holds_and_the_outer_returns_after_an_error():
    with enable_wrap(wrapper_cls=Unit, tag="outer", size=1):
        with pytest.raises(RuntimeError, match="inside"), enable_wrap(wrapper_cls=Unit, tag="inner"):
            inner = wrap(Block())
            raise RuntimeError("inside")
        outer, own = wrap(Block()), wrap(nn.Linear(1, 1), tag="own")
    assert (inner.tag, inner.size) == ("inner", None)
    assert (outer.tag, outer.size) == ("outer", 1)
    assert (own.tag, own.size) == ("own", 1)
    module = Block()
    assert wrap(module, tag="ignored") is module, "outside of enable_wrap"
    with enable_wrap(wrapper_cls=Unit):
        assert unit_names(wrap(Layered(2))) == {"", "inner", "inner.inner", "inner.inner.inner"}
    assert unit_names(Layered(2)) == set()
    for wrapper_cls in (None, "Unit"):
        with pytest.raises(TypeError, match="wrapper_cls"), enable_wrap(wrapper_cls=wrapper_cls):
            pass


class Cell(Uses):
    """The class that `planned` wraps."""


def planned(root: nn.Module, **options) -> our_wrap.WrapPlan:
    return plan_wrapping(root, ModuleWrapPolicy({Cell}), Unit, **options)


def test_only_what_is_tied_by_identity_and_not_ignored_has_an_owner():
    data, tied = torch.zeros(2), nn.Parameter(torch.zeros(2))
    root = Uses(a=Cell(w=nn.Parameter(data)), b=Cell(w=nn.Parameter(data)))
    assert planned(root).owners == {}, "of one storage"
    root = Uses(a=Cell(w=tied), b=Cell(w=tied), c=Uses(w=tied))
    assert planned(root, ignored_params=[tied]).owners == {}
    assert planned(root, ignored_modules=[root.c]).owners == {}
    assert planned(root).owners == {tied: root}


def random_graph(rng: random.Random) -> nn.Module:
    """Modules and parameters that are used in many places; about half of the modules are to be wrapped."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    modules: list[nn.Module] = []
    for _ in range(rng.randint(3, 9)):
        held: dict[str, Any] = {f"m{i}": rng.choice(modules) for i in range(rng.randint(0, 2)) if modules}
        held |= {f"p{i}": rng.choice(params) for i in range(rng.randint(0, 2))}
        modules.append(rng.choice([Uses, Cell])(**held))
    return Uses(**{f"m{i}": module for i, module in enumerate(modules[-3:])}, p=params[0])


def unit_paths(module: nn.Module | None, units: tuple[nn.Module, ...]) -> list:
    """Every path to a parameter: the parameter, and the units that the path passes through."""
    paths = [(param, units) for param in module._parameters.values()]
    for child in module._modules.values():
        paths += unit_paths(child, (*units, child) if isinstance(child, Cell) else units)
    return paths


def expected_owners(root: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """For each parameter the last unit that lies on all of its paths."""
    paths: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for param, units in unit_paths(root, (root,)):
        paths.setdefault(param, []).append(units)
    return {
        param: [unit for unit in chains[0] if all(unit in chain for chain in chains)][-1]
        for param, chains in paths.items()
    }


def claim(root: nn.Module, plan: our_wrap.WrapPlan) -> dict[nn.Parameter, list[nn.Module]]:
    """Lets each unit take what the constructor of a wrapper would take; returns the takers."""
    takers: dict[nn.Parameter, list[nn.Module]] = {p: [] for p in root.parameters()}
    left = {**plan.left_to_ancestor, root: frozenset()}
    for unit in [*plan.targets, root]:
        for param in unit.parameters():
            if not takers[param] and param not in left[unit]:
                takers[param].append(unit)
    return takers


def test_random_graphs_give_each_parameter_to_the_lowest_unit_on_all_paths_and_each_unit_its_places():
    tied = 0
    for seed in range(300):
        root = random_graph(random.Random(seed))
        plan, expected = planned(root), expected_owners(root)
        assert claim(root, plan) == {param: [owner] for param, owner in expected.items()}, seed
        assert all(expected[param] is owner for param, owner in plan.owners.items()), seed
        assert set(plan.owners) == set().union(*plan.left_to_ancestor.values()), seed
        tied += len(plan.owners)
        assert [id(p) for p in plan.owners] == [id(p) for p in root.parameters() if p in plan.owners], seed
        cells = {module for module in root.modules() if isinstance(module, Cell)}
        received: list[Any] = []

        def make(module: nn.Module, kwargs: Any, left: Any, received: list[Any] = received) -> Unit:
            received.append((module, left))
            return Unit(module)

        plan.apply(make)
        assert received == [(module, plan.left_to_ancestor[module]) for module in plan.targets], seed
        units = [module for module in root.modules() if isinstance(module, Unit)]
        assert Counter(unit._fsdp_wrapped_module for unit in units) == Counter(cells), seed
        holders = [m for m in root.modules() if not isinstance(m, Unit)]
        assert not any(isinstance(child, Cell) for m in holders for child in m.children()), seed
    assert tied > 300, "the graphs hold too few ties"
