"""No public path reaches freed memory: the whole surface of a model is walked while it is sharded.

On the CPU an operation on freed memory kills the process, so each walk has processes of its own. Promised are
the public names, and the private ones that clients of torch's wrapper use.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from bed import RankFailure, run_isolated
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, LENGTH = 8, 3
PRIVATE_BUT_PROMISED = {"_flat_param", "_fsdp_wrapped_module", "_has_params"}


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Mixer(nn.Module):
    """Modules that keep second references to their weights, or compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.halved = parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Halved())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.recurrent(x)[0]
        y = self.norm(x)
        return self.halved(x + self.attention(y, y, y, need_weights=False)[0])


class Net(nn.Module):
    """Every kind of tensor that a module may hold, ties, and a failure at will."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.mixers = nn.ModuleList([Mixer(), Mixer()])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.tensor(1.0))])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("temporary", torch.zeros(WIDTH), persistent=False)
        self.notes = {"constant": [torch.ones(3)]}
        self.fails = ""

    def forward(self, tokens):
        x = self.mixers[0](self.embed(tokens))
        if self.fails == "forward":
            raise ZeroDivisionError("in the forward")
        if self.fails == "backward":
            x.register_hook(fail)
        x = self.mixers[1](x * self.scales[0] + self.shifts["a"] + self.offset)
        return self.head(x * self.scales[1] * self.frozen)


def fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError("in the backward")


# Walking.


def span(tensor: torch.Tensor) -> int:
    """Bytes that a strided tensor's storage must have for its elements to be there."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()


def read(path: str, tensor: torch.Tensor) -> None:
    """Reads a tensor's values in several ways."""
    held = tensor.untyped_storage().nbytes()
    assert held >= span(tensor), f"{path} reaches freed memory: {span(tensor)} bytes needed, {held} there"
    tensor.detach().clone().sum(), (tensor * 2).sum(), tensor.data.tolist()
    assert repr(tensor)


def duplicate(path: str, tensor: torch.Tensor) -> None:
    """Copies a tensor in those ways that it allows."""
    for copied in (attempt(way, tensor) for way in COPIES):
        assert copied is None or torch.equal(copied.detach(), tensor.detach()), path


def via_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def via_torch_save(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = (copy.copy, copy.deepcopy, via_pickle, via_torch_save)


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    """What may be refused, but must not crash."""
    try:
        return fn(*args)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, pickle.PicklingError):
        return None


def tensors_in(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested containers and objects, each with the path to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (str, bytes, type, nn.Module)) or callable(value) or depth > 5:
        return
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from tensors_in(f"{path}[{key!r}]", child, depth + 1)
    elif isinstance(value, (list, tuple, Set, Iterator)):
        for index, child in enumerate(value):
            yield from tensors_in(f"{path}[{index}]", child, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(path, public(vars(value)), depth + 1)


def public(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if not name.startswith("_")}


class Walk:
    """Reads the tensors that it meets, each object once."""

    def __init__(self) -> None:
        self.read: dict[int, torch.Tensor] = {}

    def over(self, path: str, value: Any) -> None:
        for where, tensor in tensors_in(path, value):
            if id(tensor) not in self.read:
                self.read[id(tensor)] = tensor
                read(where, tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    self.over(f"{where}.grad", tensor.grad)

    def module(self, path: str, module: nn.Module) -> None:
        """What one module shows: attributes, what it holds, its generators and texts."""
        names = {name for name in dir(module) if not name.startswith("_")} | PRIVATE_BUT_PROMISED
        for name in sorted(names):
            self.over(f"{path}.{name}", attempt(getattr, module, name))
        held = public(vars(module)) if isinstance(module, FSDP) else vars(module)  # others are not ours
        self.over(f"{path}.__dict__", held)
        for method in ("parameters", "named_parameters", "buffers", "named_buffers"):
            self.over(f"{path}.{method}()", getattr(module, method)())
        for method in ("children", "named_children", "modules", "named_modules"):
            assert list(getattr(module, method)()) is not None
        assert repr(module) and str(module) and module.extra_repr() is not None

    def copies(self, path: str, module: nn.Module) -> None:
        for way in COPIES:
            found = attempt(way, module)
            if found is not None:
                wrapped = any(isinstance(child, FSDP) for child in found.modules())
                assert way in (copy.copy, copy.deepcopy) or not wrapped
                self.over(f"a copy of {path}", [*found.parameters(), *found.buffers(), vars(found)])


def walk(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Everything that needs no other rank, then what does."""
    walk = Walk()
    for path, module in list(model.named_modules()):
        walk.module(path or "model", module)
        if not any(isinstance(child, FSDP) for child in module.modules()):
            walk.over(f"{path}.state_dict()", module.state_dict())
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        duplicate(path, tensor)
    for path, module in list(model.named_modules()):
        walk.copies(path, module)
    walk.over("optimizer.param_groups", optimizer.param_groups)
    walk.over("optimizer.state", dict(optimizer.state))
    walk.over("optimizer.state_dict()", optimizer.state_dict())
    for path, module in list(model.named_modules()):
        if isinstance(module, FSDP):
            walk.over(f"{path}.state_dict()", module.state_dict())
            assert module.check_is_root() == (module is model)
            assert module in FSDP.fsdp_modules(model)
    assert len(walk.read) > 50


def call_methods(model: FSDP) -> None:
    """Methods that leave the values as they are."""
    trainable = [(param, param.requires_grad) for param in model.parameters()]
    for module in list(model.modules()):
        module.requires_grad_(True)
        module.eval()
        module.train()
        module.double().cpu().to("cpu")
        module.zero_grad(set_to_none=False)
        module.zero_grad()
        attempt(module.get_parameter, "weight")
        attempt(module.get_buffer, "offset")
    for param, flag in trainable:
        param.requires_grad_(flag)
    model.apply(lambda module: Walk().over("inside apply", list(module.parameters(recurse=False))))


# Situations.


def tokens() -> torch.Tensor:
    """One batch for each rank, the same on every rank."""
    return torch.randint(0, 11, (dist.get_world_size(), 2, LENGTH))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).logsumexp(-1).mean()


class Situation:
    """A wrapped model and a plain one in float64, brought to some point of training."""

    def __init__(self, wrap: str, use_orig_params: bool) -> None:
        self.plain = Net().double()
        policy = ModuleWrapPolicy({Mixer, nn.LSTM}) if wrap == "nested" else None
        self.model = FSDP(copy.deepcopy(self.plain), auto_wrap_policy=policy, use_orig_params=use_orig_params)
        modules = (self.model, self.plain)
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]

    def losses(self, batches: torch.Tensor) -> list[torch.Tensor]:
        mine, all_of_them = batches[dist.get_rank()], batches.flatten(0, 1)
        return [loss_of(self.model, mine), loss_of(self.plain, all_of_them)]

    def finish(self, losses: Iterable[torch.Tensor]) -> None:
        for loss in losses:
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.finish(self.losses(tokens()))

    def walk(self) -> None:
        walk(self.model, self.optimizers[0])

    def fail(self, where: str) -> None:
        self.model.module.fails = where
        with pytest.raises(ZeroDivisionError, match=f"in the {where}"):
            loss_of(self.model, tokens()[dist.get_rank()]).backward()
        self.model.module.fails = ""

    def check(self) -> None:
        """The model still trains as the plain one does."""
        self.step()
        found = self.model.state_dict()
        for name, expected in self.plain.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10)


def fresh(situation: Situation) -> None:
    situation.walk()
    call_methods(situation.model)


def trained(situation: Situation) -> None:
    situation.step()
    situation.walk()
    call_methods(situation.model)
    situation.walk()


def between_forward_and_backward(situation: Situation) -> None:
    situation.step()
    for optimizer in situation.optimizers:
        optimizer.zero_grad()
    losses = situation.losses(tokens())
    situation.walk()
    call_methods(situation.model)
    situation.finish(losses)
    situation.walk()


def after_evaluation(situation: Situation) -> None:
    situation.model.eval()
    with torch.no_grad():
        situation.model(tokens()[0])
    situation.walk()
    situation.model.train()


def after_a_failed_forward(situation: Situation) -> None:
    situation.step()
    situation.fail("forward")
    situation.walk()
    call_methods(situation.model)


def after_a_failed_backward(situation: Situation) -> None:
    situation.step()
    situation.fail("backward")
    situation.walk()
    call_methods(situation.model)


def after_a_derivative_with_a_graph(situation: Situation) -> None:
    model = situation.model
    scores = model(tokens()[0])
    torch.autograd.grad(scores.sum(), scores, create_graph=True)
    situation.walk()


def after_summoning(situation: Situation) -> None:
    situation.step()
    with FSDP.summon_full_params(situation.model):
        shown = Walk()
        for path, module in list(situation.model.named_modules()):
            shown.module(path, module)
    situation.walk()


def after_summoning_on_the_first_rank(situation: Situation) -> None:
    situation.step()
    with FSDP.summon_full_params(situation.model, rank0_only=True, offload_to_cpu=True, with_grads=True):
        shown = Walk()
        for path, module in list(situation.model.named_modules()):
            shown.module(path, module)
    situation.walk()


def after_copying(situation: Situation) -> None:
    situation.step()
    second = copy.deepcopy(situation.model)
    optimizer = torch.optim.AdamW(second.parameters())
    loss_of(second, tokens()[0]).backward()
    optimizer.step()
    walk(second, optimizer)
    call_methods(second)
    situation.walk()


def after_conversions(situation: Situation) -> None:
    situation.step()
    for module in (situation.model, situation.plain):
        module.zero_grad()
        module.half().double()
    situation.walk()


def after_accumulation_without_communication(situation: Situation) -> None:
    with situation.model.no_sync():
        batches = tokens()
        for loss in situation.losses(batches):
            loss.backward()
    situation.walk()
    situation.finish(situation.losses(tokens()))


SITUATIONS = {
    situation.__name__: situation
    for situation in (
        fresh,
        trained,
        between_forward_and_backward,
        after_evaluation,
        after_a_failed_forward,
        after_a_failed_backward,
        after_a_derivative_with_a_graph,
        after_summoning,
        after_summoning_on_the_first_rank,
        after_copying,
        after_conversions,
        after_accumulation_without_communication,
    )
}


def run_situation(rank: int, world_size: int, name: str, wrap: str, use_orig_params: bool) -> None:
    situation = Situation(wrap, use_orig_params)
    SITUATIONS[name](situation)
    situation.check()


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    ("name", "wrap"),
    [*((name, "nested") for name in SITUATIONS), ("trained", "whole"), ("after_a_failed_backward", "whole")],
)
def test_nothing_public_reaches_freed_memory(name, wrap, use_orig_params):
    outcomes = run_isolated(run_situation, name, wrap, use_orig_params, world_size=2)
    if any(outcome.kind != "passed" for outcome in outcomes):
        raise RankFailure(outcomes)


# Misuse: what breaks the model must still not crash the process.


def convert_inside(model: FSDP) -> None:
    model.module.half()


def empty_inside(model: FSDP) -> None:
    model.module.to_empty(device="cpu")


def replace_parameter(model: FSDP) -> None:
    model.module.head.weight = nn.Parameter(torch.zeros(11, WIDTH, dtype=torch.float64))


def remove_parameter(model: FSDP) -> None:
    del model.module.frozen


def replace_data(model: FSDP) -> None:
    for param in model.parameters():
        param.data = torch.zeros(2, dtype=torch.float64)


def resize_data(model: FSDP) -> None:
    for param in model.parameters():
        with contextlib.suppress(RuntimeError):
            param.data.resize_(1)


def load_inside(model: FSDP) -> None:
    model.module.load_state_dict(model.state_dict(), strict=False)


def share_memory(model: FSDP) -> None:
    model.share_memory()


MISUSES = {
    misuse.__name__: misuse
    for misuse in (
        convert_inside,
        empty_inside,
        replace_parameter,
        remove_parameter,
        replace_data,
        resize_data,
        load_inside,
        share_memory,
    )
}


def run_misuse(rank: int, world_size: int, name: str, use_orig_params: bool) -> None:
    model = Situation("nested", use_orig_params).model
    loss_of(model, tokens()[0]).backward()
    attempt(MISUSES[name], model)
    for _ in range(2):
        for path, module in model.named_modules():
            Walk().module(path or "model", module)
        attempt(lambda: loss_of(model, tokens()[0]).backward())


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("name", list(MISUSES))
def test_misuse_does_not_crash(name, use_orig_params):
    (outcome,) = run_isolated(run_misuse, name, use_orig_params)
    if outcome.kind != "passed":
        raise RankFailure([outcome])


def read_numbers_in_forward(rank: int, world_size: int, use_orig_params: bool) -> None:
    """As a hook does that logs a histogram: NumPy shares the memory, which then cannot be resized."""
    situation = Situation("nested", use_orig_params)
    seen = []
    hook = situation.model.module.mixers[0].module.norm.register_forward_hook(
        lambda module, args, out: seen.append(module.weight.detach().numpy())
    )
    situation.step()
    hook.remove()
    situation.check()
    assert (seen[0] == 1).all()


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_numbers_read_in_a_forward_stay(use_orig_params):
    (outcome,) = run_isolated(read_numbers_in_forward, use_orig_params)
    if outcome.kind != "passed":
        raise RankFailure([outcome])


def read_normed_weight(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Torch's kernel behind it writes out of bounds where shapes do not fit; many calls make that show."""
    net = parametrizations.weight_norm(nn.Linear(64, 64))
    model = FSDP(nn.Sequential(net), use_orig_params=use_orig_params)
    for _ in range(50):
        attempt(lambda: net.weight.sum())
    model(torch.randn(2, 64)).sum().backward()


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_weight_that_is_computed_from_sharded_parameters(use_orig_params):
    (outcome,) = run_isolated(read_normed_weight, use_orig_params)
    if outcome.kind != "passed":
        raise RankFailure([outcome])


# The walk itself.


def walk_over_freed_memory(rank: int, world_size: int, checked: bool) -> None:
    module = nn.Linear(200, 200)
    module.kept = [{"view": module.weight.detach()[1:]}]
    module.weight.untyped_storage().resize_(0)
    if checked:
        Walk().module("module", module)
    else:
        module.kept[0]["view"].sum()


def test_walk_names_the_path_to_freed_memory():
    (outcome,) = run_isolated(walk_over_freed_memory, True)
    assert outcome.kind == "failed"
    assert "module.kept[0]['view'] reaches freed memory" in outcome.text


def test_reading_freed_memory_is_noticed():
    (outcome,) = run_isolated(walk_over_freed_memory, False)
    assert (outcome.kind, outcome.headline) == ("died", "killed by SIGSEGV")
