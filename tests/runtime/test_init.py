"""How a module gets its values: initialised from the meta device, received from the first rank, or loaded."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from bed.memory import Peak, only_new_objects, settled_bytes
from bed.references import count_collectives
from fronts import assert_tensors
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._building import materialize as _materialize
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy
from models import gather_objects


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("steps", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.steps.copy_(torch.arange(3))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(width, 5), Scale(5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, width)

    def forward(self, x):
        return x + self.down(self.norm(self.scale(self.up(x))).tanh())


class Net(nn.Module):
    """Embedding and head are tied, as are the second layer's `down` and the first's; a layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.layers[1].down.weight = self.layers[0].down.weight
        self.layers[2].requires_grad_(False)
        self.embed.weight.tag = "tied"
        self.double()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def by_hand(net: Net, **kwargs: Any) -> FSDP:
    for index, layer in enumerate(net.layers):
        net.layers[index] = FSDP(layer, **kwargs)
    return FSDP(net, **kwargs)


def by_policy(net: nn.Module, **kwargs: Any) -> FSDP:
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Layer}), **kwargs)


WRAPPINGS: dict[str, Callable[..., FSDP]] = {
    "whole": FSDP,
    "policy": by_policy,
    "always": lambda net, **kwargs: FSDP(net, auto_wrap_policy=always_wrap_policy, **kwargs),
    "hand": by_hand,
}


def fill(module: nn.Module) -> None:
    """Gives a module's own tensors values that depend on their shapes only."""
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).cos() + 2)


def materialise_and_fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def replace_and_fill(module: nn.Module) -> None:
    """Registers new parameters, as an initialiser written by hand may do."""
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(param.shape, dtype=param.dtype)))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    fill(module)


def assert_same_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(expected)
    assert_tensors(state, expected)


def train(model: nn.Module) -> None:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    model.eval()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 11, (4,), generator=generator)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def assert_trains_like(model: FSDP, plain: nn.Module) -> None:
    """Every rank sees the same batches, so a plain module is the reference."""
    train(plain)
    train(model)
    assert_tensors(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("wrapping", ["whole", "policy", "hand"])
@ranks(2)
def test_reset_parameters(rank, world_size, wrapping, synchronised):
    """By each rank for its part, or by the first, for all."""
    torch.manual_seed(rank)
    net = on_meta(Net)
    embedding = net.embed.weight
    model = WRAPPINGS[wrapping](net, use_orig_params=True, sync_module_states=synchronised)
    held = {id(param): param for param in model.parameters()}
    assert held[id(embedding)].tag == "tied"  # the user's own object, attributes and all
    plain = Net()
    plain.load_state_dict(model.state_dict())
    states = gather_objects(plain.state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states), name
    for value in plain.parameters():
        assert value.isfinite().all() and value.abs().max() < 5
    assert plain.head.weight.std() > 0.5  # an embedding's values, not those of a linear layer
    for layer in plain.layers:
        assert layer.scale.steps.tolist() == [0, 1, 2]
        assert layer.norm.running_var.tolist() == [1.0] * 5
        assert layer.up.weight.std() > 0.05
    assert_trains_like(model, plain)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)  # no reset_parameters; touches a child
        self.recurrent = nn.LSTM(4, 4, num_layers=2)  # keeps lists of its weights
        self.convolution = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.scale = Scale(4)

    def forward(self, x):
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        return self.scale(self.norm(self.convolution(x.transpose(1, 2)).transpose(1, 2)))


@ranks(2)
def test_values_are_those_of_a_module_made_on_the_cpu(rank, world_size):
    torch.manual_seed(0)
    plain = Many()
    x = torch.randn(5, 3, 4)
    for policy in (None, ModuleWrapPolicy({type(child) for child in plain.children()})):
        net = on_meta(Many)
        torch.manual_seed(0)
        model = FSDP(net, auto_wrap_policy=policy, use_orig_params=True)
        assert_same_state(model, plain.state_dict())
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()


@ranks(2)
def test_what_has_values_keeps_them(rank, world_size):
    names = ["layers.1.up.weight", "layers.0.scale.weight", "layers.1.norm.bias", "head.bias"]
    for function in (None, materialise_and_fill, replace_and_fill):
        net = Net()
        for name in names:
            owner, _, attribute = name.rpartition(".")
            place = net.get_submodule(owner)
            setattr(place, attribute, nn.Parameter(getattr(place, attribute).to("meta")))
        net.layers[1].norm.running_mean = torch.empty(5, dtype=torch.float64, device="meta")
        net.layers[1].norm.num_batches_tracked.fill_(7)
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        model = by_policy(net, param_init_fn=function, use_orig_params=True)
        state = model.state_dict()
        for name, value in expected.items():
            assert not state[name].is_meta
            assert value.is_meta or torch.equal(state[name], value), name
        assert expected["layers.1.norm.running_mean"].is_meta
        train(model)


@ranks(2)
def test_initialisation_goes_as_apply_would_and_may_fail_or_leave_things_out(rank, world_size):
    """Per unit children first, for what holds meta tensors and for what is above it."""
    called: list[str] = []
    net = on_meta(Net)
    net.layers[0].up.to_empty(device="cpu")
    names = {module: name for name, module in net.named_modules()}

    def note(module: nn.Module) -> None:
        called.append(names[module])
        materialise_and_fill(module)
        if isinstance(module, Layer):  # a parent may adjust what its children got
            nn.init.constant_(module.scale.weight, 3.0)

    state = by_policy(net, param_init_fn=note).state_dict()
    layers = [[f"layers.{i}.{child}" for child in ("up", "scale", "norm", "down")] for i in range(3)]
    layers[0].remove("layers.0.up")
    layers = [[*children, f"layers.{i}"] for i, children in enumerate(layers)]
    assert called == [*layers[0], *layers[1], *layers[2], "embed", "head", ""]
    assert (state["layers.1.scale.weight"] == 3.0).all() and (state["layers.1.up.weight"] != 3.0).any()

    def fail(module: nn.Module) -> None:
        raise LookupError("no values today")

    net = on_meta(Net)
    net.layers[0] = FSDP(net.layers[0], param_init_fn=materialise_and_fill, use_orig_params=True)
    tied = net.layers[1].down.weight
    with pytest.raises(LookupError, match="no values today"):
        FSDP(net.layers[1], param_init_fn=fail, use_orig_params=True)
    assert net.layers[1].down.weight is tied and net.layers[1].up.weight.is_meta
    FSDP(net.layers[1], param_init_fn=materialise_and_fill, use_orig_params=True)
    assert net.layers[1].down.weight is net.layers[0].down.weight
    for wrapping, wrap in WRAPPINGS.items():
        net = on_meta(Net)
        ignored = [net.layers[1].scale, net.layers[0].up.weight]
        state = wrap(net, ignored_states=ignored, use_orig_params=True).state_dict()
        left = {"layers.0.up.weight", "layers.1.scale.weight", "layers.1.scale.steps"}
        assert {name for name, value in state.items() if value.is_meta} == left, wrapping


class Special(nn.Parameter):
    pass


def forget_down(module: nn.Module) -> None:
    if getattr(module, "out_features", 0) != 6:
        materialise_and_fill(module)


def specialise(module: nn.Module) -> None:
    materialise_and_fill(module)
    if isinstance(module, nn.Linear):
        module.bias = Special(module.bias.detach())


def choose_dtype_and_freeze(module: nn.Module) -> None:
    materialise_and_fill(module)
    if isinstance(module, nn.Linear):
        module.double().requires_grad_(False)


@ranks(2)
def test_what_param_init_fn_may_do_and_what_is_refused(rank, world_size):
    whole = r"meta device.*'layers.0.down.weight'.*'layers.2.down.bias'.*param_init_fn"
    for wrap, make, function, message in (
        (FSDP, Net, forget_down, whole),
        (by_policy, Net, forget_down, r"in 'layers.0'.*'down.bias'.*param_init_fn"),
        (FSDP, Layer, specialise, r"'up\.bias' a Special.*must stay a Parameter"),
    ):
        with pytest.raises(RuntimeError, match=message):
            wrap(on_meta(make), param_init_fn=function)
    net = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale(3)))
    model = FSDP(net, param_init_fn=choose_dtype_and_freeze)
    facts = {name: (value.dtype, value.numel()) for name, value in model.state_dict().items()}
    assert facts["0.weight"] == (torch.float64, 9) and facts["1.weight"] == (torch.float32, 3)
    held = {(param.dtype, param.requires_grad) for param in model.parameters()}
    assert held == {(torch.float64, False), (torch.float32, True)}


@ranks(1, 3)
def test_parts_that_borrow_get_the_states_of_the_first_rank_and_load_by_themselves(rank, world_size):
    torch.manual_seed(rank)
    net: Any = Net() if rank == 0 else on_meta(Net)
    expected = gather_objects(net.state_dict() if rank == 0 else None)[0]
    called: list[nn.Module] = []
    options: dict[str, Any] = {"sync_module_states": True, "param_init_fn": called.append}
    model = by_hand(net, use_orig_params=True, **options)
    assert called == [], "neither what has values nor what receives them is initialised"
    assert_same_state(model, expected)
    torch.manual_seed(0)
    part, before = Layer(), model.state_dict()
    with count_collectives() as traffic:
        net.layers[1].load_state_dict(part.state_dict())
    assert traffic == {}
    loaded = {f"layers.1.{name}": value for name, value in part.state_dict().items()}
    loaded["layers.0.down.weight"] = loaded["layers.1.down.weight"]
    assert_same_state(model, before | {name: value.to(before[name].dtype) for name, value in loaded.items()})


DTYPES = [
    torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(15).reshape(3, 5) % 2
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.register_buffer("buffer", values[0].to(dtype))
        self.register_buffer("scalar", values[0, 1].to(dtype), persistent=False)
        self.register_buffer("strided", values.to(dtype).t())
        self.register_buffer("empty", values[:0].to(dtype))


@ranks(2)
def test_states_of_every_dtype_travel(rank, world_size):
    for dtype, use_orig_params in itertools.product(DTYPES, (False, True)):
        net = Typed(dtype) if rank == 0 else on_meta(partial(Typed, dtype))
        model = FSDP(net, sync_module_states=True, use_orig_params=use_orig_params)
        expected = Typed(dtype)
        state = model.state_dict()
        for name, value in expected.state_dict().items():
            assert state[name].shape == value.shape and state[name].dtype == dtype
            assert state[name].flatten().tolist() == value.flatten().tolist(), (name, dtype)
        assert torch.equal(model.scalar.double(), expected.scalar.double())
        assert model.strided.stride() == expected.strided.stride()


@ranks(2)
def test_messages_are_bounded(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_materialize, "_MESSAGE_BYTES", 1000)
        net = nn.Linear(100, 7) if rank == 0 else on_meta(lambda: nn.Linear(100, 7))
        with count_collectives() as traffic:
            FSDP(net, sync_module_states=True)
    assert traffic["broadcast"].calls == 4  # 2800 bytes of the weight, 28 of the bias
    assert traffic["broadcast"].bytes == 2828


@ranks(3)
def test_modules_that_differ_between_ranks(rank, world_size):
    differences: list[tuple[int, nn.Module]] = [
        (1, nn.Linear(4, 5)),
        (2, nn.Linear(4, 5)),
        (2, nn.Linear(4, 4).double()),
        (2, Scale(4)),
        (2, nn.Linear(4, 4).requires_grad_(False)),
        (2, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    ]
    for culprit, other in differences:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        if rank == culprit:
            net[1] = other
        with pytest.raises(ValueError, match="same parameters and buffers on all ranks") as caught:
            FSDP(net, sync_module_states=True)
        messages = gather_objects(str(caught.value))
        assert f"rank {culprit} has '1." in messages[culprit], other
        assert "the first '1." in messages[culprit] and "errors of the other ranks" in messages[0], other


class Tower(nn.Module):
    """Equal units; the root owns as much as one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.squares = nn.ModuleList(nn.Sequential(nn.Linear(512, 512)) for _ in range(6))


UNIT_BYTES = 4 * (512 * 512 + 512)


@contextmanager
def peak_within(least: float, most: float) -> Iterator[None]:
    before = settled_bytes()
    with Peak(before + most * UNIT_BYTES) as peak:
        yield
    assert least <= (peak.value - before) / UNIT_BYTES <= most


class Reading(Mapping[str, torch.Tensor]):
    """Reads each value from a file of its own, when asked."""

    def __init__(self, folder: Path, rank: int, values: Mapping[str, torch.Tensor]) -> None:
        self._files = {name: folder / f"{name}{rank}" for name in values}
        for name, value in values.items():
            torch.save(value, self._files[name])

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.load(self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@pytest.mark.parametrize(
    ("way", "use_orig_params"),
    [("reset", True), ("received", True), ("mapped file", False), ("mapping that reads", True)],
)
@ranks(4)
def test_values_arrive_in_the_memory_of_the_shard_and_one_unit(
    rank, world_size, way, use_orig_params, tmp_path
):
    torch.manual_seed(0)
    has_all, shards = way == "received" and rank == 0, 7 / world_size
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "sync_module_states": way == "received"}
    state: Any = None
    with only_new_objects():
        net: nn.Module = Tower()
        torch.save(net.state_dict(), tmp_path / f"all{rank}")
        reading = Reading(tmp_path, rank, net.state_dict())
        if way.startswith("mapp"):
            options["param_init_fn"] = partial(nn.Module.to_empty, device="cpu", recurse=False)
            state = torch.load(tmp_path / f"all{rank}", mmap=True) if way == "mapped file" else reading
        if not has_all:
            net = on_meta(Tower)
        peak = peak_within(*((0, 0.3) if has_all else (shards, shards + 1.05)))
        with peak, count_collectives() as traffic:
            model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)
            if state is not None:
                model.load_state_dict(state)
        del net, state
        assert settled_bytes() <= (shards + 0.05) * UNIT_BYTES
    assert len(FSDP.fsdp_modules(model)) == 7
    if way != "reset":
        assert_same_state(model, {name: reading[name] for name in reading})
    assert (traffic == {}) == (way != "received")
