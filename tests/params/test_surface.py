"""No public path reaches freed memory: the whole surface of a model is walked while it is sharded.

On the CPU an operation on freed memory kills the process, so each walk has processes of its own. Promised are
the public names, and the private ones that clients of torch's wrapper use.
"""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from bed import RankFailure, run_isolated
from fronts import assert_tensors, each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, LENGTH = 8, 3
PRIVATE_BUT_PROMISED = {"_flat_param", "_fsdp_wrapped_module", "_has_params"}


class Mixer(nn.Module):
    """Modules that keep second references to their weights, or compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.computed = parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", nn.Tanh())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.recurrent(x)[0]
        y = self.norm(x)
        return self.computed(x + self.attention(y, y, y, need_weights=False)[0])


class Net(nn.Module):
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
            raise ZeroDivisionError
        if self.fails == "backward":
            x.register_hook(lambda grad: 1 / 0)
        x = self.mixers[1](x * self.scales[0] + self.shifts["a"] + self.offset)
        return self.head(x * self.scales[1] * self.frozen)


# Walking.


def read(path: str, tensor: torch.Tensor) -> None:
    held = tensor.untyped_storage().nbytes()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    span = (int(tensor.storage_offset()) + reach + 1) * tensor.element_size() if tensor.numel() else 0
    assert held >= span, f"{path} reaches freed memory: {span} bytes needed, {held} there"
    tensor.detach().clone().sum(), (tensor * 2).sum(), tensor.data.tolist()
    assert repr(tensor)


def via_torch_save(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), via_torch_save)


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls what may be refused, but must not crash."""
    try:
        return fn(*args)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, pickle.PicklingError):
        return None


def tensors_in(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
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

    def modules(self, model: nn.Module) -> None:
        for path, module in list(model.named_modules()):
            self.module(path or "model", module)

    def copies(self, path: str, module: nn.Module) -> None:
        for way in COPIES:
            copied = attempt(way, module)
            if copied is not None:
                wrapped = any(isinstance(child, FSDP) for child in copied.modules())
                assert way in (copy.copy, copy.deepcopy) or not wrapped
                self.over(f"a copy of {path}", [*copied.parameters(), *copied.buffers(), vars(copied)])


def walk(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    walk = Walk()
    walk.modules(model)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for copied in (attempt(way, tensor) for way in COPIES):
            assert copied is None or torch.equal(copied.detach(), tensor.detach()), path
    for path, module in list(model.named_modules()):
        walk.copies(path, module)
    walk.over("optimizer.param_groups", optimizer.param_groups)
    walk.over("optimizer.state", dict(optimizer.state))
    walk.over("optimizer.state_dict()", optimizer.state_dict())
    for path, module in list(model.named_modules()):
        walk.over(f"{path}.state_dict()", module.state_dict())
    assert len(walk.read) > 50


# Situations.


def tokens() -> torch.Tensor:
    return torch.randint(0, 11, (dist.get_world_size(), 2, LENGTH))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).logsumexp(-1).mean()


class Situations:
    """A wrapped model and a plain one in float64, which train alike whatever is looked at and called."""

    def __init__(self, wrap: str, use_orig_params: bool) -> None:
        self.plain = Net().double()
        policy = ModuleWrapPolicy({Mixer, nn.LSTM}) if wrap == "nested" else None
        self.model = FSDP(copy.deepcopy(self.plain), auto_wrap_policy=policy, use_orig_params=use_orig_params)
        self.modules = (self.model, self.plain)
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in self.modules]

    def losses(self) -> list[torch.Tensor]:
        batches = tokens()
        return [loss_of(self.model, batches[dist.get_rank()]), loss_of(self.plain, batches.flatten(0, 1))]

    def step(self, between: Callable[[], object] = lambda: None, zeroed: bool = True) -> None:
        for optimizer in self.optimizers if zeroed else ():
            optimizer.zero_grad()
        losses = self.losses()
        between()
        for loss in losses:
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def walk(self) -> None:
        walk(self.model, self.optimizers[0])
        trainable = [(param, param.requires_grad) for param in self.model.parameters()]
        for module in list(self.model.modules()):
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
        self.model.apply(lambda child: Walk().over("inside apply", list(child.parameters(recurse=False))))

    def summon(self, **options: Any) -> None:
        with FSDP.summon_full_params(self.model, **options):
            Walk().modules(self.model)

    def check(self) -> None:
        self.step()
        assert_tensors(self.model.state_dict(), self.plain.state_dict(), rtol=0, atol=1e-10)

    def run(self) -> None:
        self.walk()
        self.check()
        self.step(between=self.walk)  # after the forward, before the backward
        self.walk()
        with torch.no_grad():
            self.model.eval()(tokens()[0])
        self.walk()
        self.model.train()
        for where in ("forward", "backward"):
            self.model.module.fails = where
            with pytest.raises(ZeroDivisionError):
                loss_of(self.model, tokens()[dist.get_rank()]).backward()
            self.model.module.fails = ""
            self.walk()
            self.check()
        scores = self.model(tokens()[0])
        torch.autograd.grad(scores.sum(), scores, create_graph=True)
        self.walk()
        self.summon()
        self.walk()
        self.summon(rank0_only=True, offload_to_cpu=True, with_grads=True)
        self.walk()
        self.check()
        second = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(second.parameters())
        loss_of(second, tokens()[0]).backward()
        optimizer.step()
        walk(second, optimizer)
        self.walk()
        self.check()
        for module in self.modules:
            module.zero_grad()
            module.half().double()
        self.walk()
        self.check()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.model.no_sync():
            for loss in self.losses():
                loss.backward()
        walk(self.model, self.optimizers[0])
        self.step(zeroed=False)
        self.check()


def run_situations(rank: int, world_size: int, wrap: str, use_orig_params: bool) -> None:
    torch.set_printoptions(threshold=4, edgeitems=1)  # `tolist` reads the rest sooner
    Situations(wrap, use_orig_params).run()


def run(body: Callable[..., None], *args: Any, world_size: int = 1) -> None:
    outcomes = run_isolated(body, *args, world_size=world_size)
    if any(outcome.kind != "passed" for outcome in outcomes):
        raise RankFailure(outcomes)


@pytest.mark.parametrize(("wrap", "use_orig_params"), [("nested", False), ("nested", True), ("whole", False)])
def test_nothing_public_reaches_freed_memory(wrap, use_orig_params):
    run(run_situations, wrap, use_orig_params, world_size=2)


# Misuse: what breaks the model must still not crash the process.


def change_data(model: FSDP, change: Callable[[nn.Parameter], Any]) -> None:
    for param in model.parameters():
        with contextlib.suppress(RuntimeError):
            change(param)


MISUSES: list[Callable[[Any], Any]] = [
    lambda model: model.module.half(),
    lambda model: model.module.to_empty(device="cpu"),
    lambda model: delattr(model.module, "frozen"),
    lambda model: model.module.load_state_dict(model.state_dict(), strict=False),
    lambda model: model.share_memory(),
    lambda model: setattr(model.module.head, "weight", nn.Parameter(torch.zeros(11, WIDTH).double())),
    lambda model: change_data(model, lambda param: setattr(param, "data", torch.zeros(2).double())),
    lambda model: change_data(model, lambda param: param.data.resize_(1)),
]


def run_misuses(rank: int, world_size: int, use_orig_params: bool) -> None:
    torch.set_printoptions(threshold=4, edgeitems=1)
    for misuse in MISUSES:
        model = Situations("nested", use_orig_params).model
        loss_of(model, tokens()[0]).backward()
        attempt(misuse, model)
        for _ in range(2):
            Walk().modules(model)
            attempt(lambda model=model: loss_of(model, tokens()[0]).backward())


@each_form
def test_misuse_does_not_crash(use_orig_params):
    run(run_misuses, use_orig_params)


# The walk itself.


def walk_over_freed_memory(rank: int, world_size: int) -> None:
    module = nn.Linear(200, 200)
    module.kept = [{"view": module.weight.detach()[1:]}]
    module.weight.untyped_storage().resize_(0)
    Walk().module("module", module)


def test_the_walk_names_the_path_to_freed_memory():
    (outcome,) = run_isolated(walk_over_freed_memory)
    assert outcome.kind == "failed"
    assert "module.kept[0]['view'] reaches freed memory" in outcome.text
