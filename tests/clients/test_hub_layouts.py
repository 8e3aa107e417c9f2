"""Models as they lie on the Hub, loaded into shards: equal to what `from_pretrained` makes of the files."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bed import ranks
from bed.memory import settled_bytes
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from launch import needs

pytestmark = needs("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BLOCK = 16
MODELS = ("llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def _layouts_differ():
    pytest.importorskip("transformers.core_model_loading")


def _config(kind: str) -> Any:
    import transformers

    experts: dict[str, dict[str, Any]] = {
        "llama": {"tie_word_embeddings": True},
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
        "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "intermediate_size": 64},
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    }
    return transformers.AutoConfig.for_model(kind, **{**SIZES, **experts[kind]})


def _saved(kind: str, folder: Path, quantised: bool = False) -> None:
    """Writes a model as it lies on the Hub, in several files, quantised if asked."""
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(_config(kind), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    if quantised:
        {"deepseek_v3": _as_fp8, "gpt_oss": _as_mxfp4}[kind](folder)


def _rewrite(folder: Path, change: Any, about: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    for file in sorted({*json.loads(index.read_text())["weight_map"].values()}):
        tensors: dict[str, torch.Tensor] = {}
        for name, value in load_file(folder / file).items():
            tensors |= change(name, value)
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))


def _as_fp8(folder: Path) -> None:
    """Quantises the weights of linear layers by blocks, as DeepSeek's files have them."""

    def change(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        linear = "_proj" in name or "experts" in name
        if not linear or value.dim() != 2 or any(size % BLOCK for size in value.shape):
            return {name: value}
        rows, columns = (size // BLOCK for size in value.shape)
        blocks = value.float().view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).view(value.shape).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scale}

    block = [BLOCK, BLOCK]
    _rewrite(
        folder, change, {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    )


def _as_mxfp4(folder: Path) -> None:
    """Writes experts as codes of 4 bits, with one scale for 32, as gpt-oss's files have them."""

    def change(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: value}
        experts, inner, outer = value.shape
        generator = torch.Generator().manual_seed(len(name))
        shape = (experts, outer, inner // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    _rewrite(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": []})


def _loaded_by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _on_meta(kind: str, dtype: torch.dtype) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(_config(kind), dtype=dtype).eval()


def _sharded(model: Any, how: str) -> Any:
    layers = model.model.layers
    if how.startswith("fully_shard"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
        options: dict[str, Any] = {"mesh": mesh["data"]} if how != "fully_shard hsdp" else {"mesh": mesh}
        if how == "fully_shard tp":
            places = {"self_attn.q_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
            for layer in layers:
                parallelize_module(layer, mesh["other"], places)
        if how == "fully_shard ep":
            for layer in layers:
                _spread_experts(layer.mlp, mesh["other"])
        for layer in layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    def init(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    policy = ModuleWrapPolicy({type(layers[0])})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=how == "orig", param_init_fn=init)


def _spread_experts(mlp: Any, mesh: Any) -> None:
    if not hasattr(mlp, "experts"):
        return
    for name, param in [*mlp.experts.named_parameters(recurse=False)]:
        local = torch.empty(len(param) // mesh.size(), *param.shape[1:], dtype=param.dtype, device="meta")
        spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(mlp.experts, name, torch.nn.Parameter(spread))


def _full(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return {name: value.clone() for name, value in model.module.state_dict().items()}
    values = model.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in values.items()}


def _clean(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in values.items()}


def _assert_loads(kind: str, folder: Path, how: str, dtype: torch.dtype, rank: int, **options: Any) -> None:
    if rank == 0:
        _saved(kind, folder, quantised="quantised" in options)
    dist.barrier()
    options.pop("quantised", None)
    wanted = _loaded_by_transformers(folder, dtype)
    model = _sharded(_on_meta(kind, dtype), how)
    missing, unexpected = checkpoint.import_safetensors(model, folder, **options)
    assert (missing, unexpected) == ([], [])
    loaded = _clean(_full(model))
    for name, value in wanted.state_dict().items():
        assert torch.equal(loaded[name], value), name
    for name, buffer in wanted.named_buffers():  # those too that no file has
        own = _clean(dict(model.named_buffers()))[name]
        assert torch.equal(own, buffer), name
    if how in ("fully_shard tp", "fully_shard ep"):
        return  # whose forwards need transformers to know of the mesh
    tokens = torch.arange(12).view(2, 6) + 3
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, wanted(input_ids=tokens).logits)


@pytest.mark.left_over(4)
@pytest.mark.parametrize("how", ["fully_shard hsdp", "orig", "flat"])
@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_it_loads_as_from_pretrained(rank, world_size, tmp_path, kind, how):
    dtype = torch.float32 if how == "orig" else torch.bfloat16
    _assert_loads(kind, tmp_path, how, dtype, rank)


@pytest.mark.left_over(4)
@pytest.mark.parametrize("budget", ["256MiB", 1])
@pytest.mark.parametrize("how", ["fully_shard", "orig", "flat"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
@ranks(4)
def test_quantised_files_become_numbers(rank, world_size, tmp_path, kind, how, budget):
    _assert_loads(kind, tmp_path, how, torch.bfloat16, rank, quantised=True, budget=budget)


# The queries of DeepSeek V3 are in two layers of other names.
@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *(("fully_shard tp", kind) for kind in MODELS if kind != "deepseek_v3"),
        *(("fully_shard ep", kind) for kind in MODELS if kind != "llama"),
    ],
)
@ranks(4)
def test_it_loads_into_meshes(rank, world_size, tmp_path, kind, how):
    _assert_loads(kind, tmp_path, how, torch.bfloat16, rank, budget=1)


@pytest.mark.left_over(4)
@pytest.mark.parametrize("how", ["fully_shard hsdp", "fully_shard ep", "flat"])
@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_exports_are_those_of_save_pretrained(rank, world_size, tmp_path, kind, how):
    from safetensors.torch import load_file

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    if rank == 0:
        _saved(kind, theirs)
    dist.barrier()
    model = _sharded(_on_meta(kind, torch.bfloat16), how)
    checkpoint.import_safetensors(model, theirs)
    options: dict[str, Any] = {"max_shard_size": "20KB", "files": [theirs / "config.json"]}
    files = checkpoint.export_safetensors(model, ours, **options)
    assert sorted(files) == sorted(path.name for path in ours.glob("*.safetensors"))
    stored, wanted = (
        {
            name: value
            for path in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(path).items()
        }
        for folder in (ours, theirs)
    )
    assert stored.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(stored[name], value), name
    again = _loaded_by_transformers(ours, torch.bfloat16)
    for name, value in _loaded_by_transformers(theirs, torch.bfloat16).state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


OTHERS = {
    "cohere2_moe": "tied, beside experts",
    "dinov2": "one weight becomes three",
    "gemma3": "tied, in a model of two towers",
    "hrm_text": "one weight becomes several",
    "jamba": "experts in some layers",
    "kimi_linear": "three weights become one",
    "llava": "buffers whose initialisation reaches weights",
    "nemotron_h": "experts with one matrix",
    "nomic_bert": "one weight becomes two",
    "qwen3_next": "experts beside a shared one",
    "qwen3_vl_moe": "fused experts that lie transposed",
}
SMALL = {
    **SIZES,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}


def _small(kind: str) -> Any:
    """Makes a small model of a class, with what its configuration and those of its parts know of `SMALL`."""
    import transformers

    whole = transformers.AutoConfig.for_model(kind)
    known: dict[str, Any] = {name: value for name, value in SMALL.items() if hasattr(whole, name)}
    for part in ("text_config", "vision_config"):
        if getattr(whole, part, None) is not None:
            own = getattr(whole, part)
            known[part] = {name: value for name, value in SMALL.items() if hasattr(own, name)}
    config = transformers.AutoConfig.for_model(kind, **known)
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = transformers.AutoModelForCausalLM if kind in causal else transformers.AutoModel
    torch.manual_seed(3)
    return auto.from_config(config, dtype=torch.float32)


@pytest.mark.left_over(4)
@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_layouts_go_both_ways(tmp_path, kind):
    from safetensors.torch import load_file
    from transformers import AutoConfig

    if kind not in _known_kinds():
        pytest.skip(f"this transformers has no {kind}")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model = _small(kind)
    model.save_pretrained(theirs)
    wanted = type(model).from_pretrained(theirs, dtype=torch.float32)
    with torch.device("meta"):
        loaded = type(model)(AutoConfig.from_pretrained(theirs))
    assert checkpoint.import_safetensors(loaded, theirs, budget="1MiB") == ([], [])
    for mine, its in (
        (loaded.state_dict(), wanted.state_dict()),
        (loaded.named_buffers(), wanted.named_buffers()),
    ):
        mine, its = dict(mine), dict(its)
        assert mine.keys() == its.keys()
        assert [name for name, value in its.items() if not torch.equal(mine[name], value)] == []
    assert len([*loaded.parameters()]) == len([*wanted.parameters()]), "what is tied stays tied"
    checkpoint.export_safetensors(loaded, ours)
    written = {name: value for path in ours.glob("*.safetensors") for name, value in load_file(path).items()}
    stored = {name: value for path in theirs.glob("*.safetensors") for name, value in load_file(path).items()}
    assert written.keys() == stored.keys()
    assert [name for name, value in stored.items() if not torch.equal(written[name], value)] == []


def _known_kinds() -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


@ranks(2)
def test_tied_parameters_on_the_meta_device_stay_tied(rank, world_size, tmp_path):
    if rank == 0:
        _saved("llama", tmp_path)
    dist.barrier()
    for sharded in (False, True):
        model = _on_meta("llama", torch.bfloat16)
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        checkpoint.import_safetensors(model, tmp_path)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        model(input_ids=torch.arange(8).view(1, -1)).logits.sum().backward()
        assert model.lm_head.weight.grad is not None


def _saves_experts_apart(folder: Path) -> Any:
    """Makes files of experts one by one, and reads which tensors a conversion keeps in memory."""
    from fsdp_wrap.checkpoint._hub import HubLayout
    from fsdp_wrap.checkpoint._safetensors import read_safetensors

    _saved("qwen3_moe", folder)
    model = _on_meta("qwen3_moe", torch.bfloat16)
    layout = HubLayout.of(model)
    assert layout is not None
    return layout.as_parameters(read_safetensors(folder), {}, folder, 2**20)


def test_one_conversion_alone_keeps_what_it_made(tmp_path):
    from fsdp_wrap.checkpoint._hub.converted import Converted

    params = [param for param in _saves_experts_apart(tmp_path).values() if isinstance(param, Converted)]
    assert len(params) == 2 * SIZES["num_hidden_layers"]
    before = settled_bytes()
    for param in params:
        param.read(0, param.shape.numel() // 2)  # as a rank does that holds the first half
    kept = settled_bytes() - before
    assert 0 < kept <= max(param.shape.numel() * param.dtype.itemsize for param in params)


@ranks(4)
def test_what_does_not_fit_is_refused_and_the_model_stays_on_meta(rank, world_size, tmp_path):
    if rank == 0:
        _saved("qwen3_moe", tmp_path)
    dist.barrier()
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    dist.barrier()
    if rank == 0:
        del content["weight_map"][lost]
        index.write_text(json.dumps(content))
    dist.barrier()
    model = _sharded(_on_meta("qwen3_moe", torch.bfloat16), "fully_shard")
    with pytest.raises(RuntimeError, match="made of 4 tensors, and the files have 3"):
        checkpoint.import_safetensors(model, tmp_path)
    assert all(param.is_meta for param in model.parameters())
    config = tmp_path / "config.json"
    dist.barrier()
    if rank == 0:
        about = {"quant_method": "awq", "bits": 4}
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": about}))
    dist.barrier()
    with pytest.raises(ValueError, match="quantised by awq, which only transformers can load"):
        checkpoint.import_safetensors(model, tmp_path)


FP8 = torch.float8_e4m3fn
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "kv_lora_rank": 112,
    "q_lora_rank": 128,
}
"""Sizes with whole blocks, but for some projections of DeepSeek V3."""
LEFT = {
    "llama": r"embed_tokens|norm",
    "mixtral": r"embed_tokens|norm|block_sparse_moe\.gate\.|lm_head",
    "qwen3_moe": r"embed_tokens|norm|mlp\.gate\.|lm_head",
    "deepseek_v3": r"embed_tokens|norm|mlp\.gate\.|lm_head|kv_b_proj|o_proj",
    "gpt_oss": r"embed_tokens|norm|router|experts|bias|sinks|lm_head",
}
"""What files in fp8 hold in the model's dtype."""


def _wide(kind: str) -> Any:
    config = _config(kind)
    for name, size in WIDE.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return config


def _wide_on_meta(kind: str) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(_wide(kind), dtype=torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("kind", "how"),
    [*zip(MODELS, ("flat", "fully_shard hsdp", "fully_shard ep", "fully_shard hsdp", "orig"))],
)
@ranks(4)
def test_exports_in_fp8_are_read_by_transformers_and_by_us(rank, world_size, tmp_path, kind, how):
    import transformers
    from safetensors.torch import load_file

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    if rank == 0:
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(_wide(kind), dtype=torch.bfloat16).save_pretrained(
            theirs
        )
    dist.barrier()
    model = _sharded(_wide_on_meta(kind), how)
    checkpoint.import_safetensors(model, theirs)
    checkpoint.export_safetensors(
        model, ours, dtype=FP8, max_shard_size="300KB", files=[theirs / "config.json"]
    )
    dist.barrier()
    stored = {name: value for path in ours.glob("*.safetensors") for name, value in load_file(path).items()}
    before = load_file(theirs / "model.safetensors")
    for name, value in before.items():
        if re.search(LEFT[kind], name):
            assert torch.equal(stored.pop(name), value), name
        else:
            codes, scales = stored.pop(name), stored.pop(f"{name}_scale_inv")
            assert codes.dtype == FP8 and scales.dtype == torch.float32
            meant = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert ((meant - value.float()).abs() <= value.abs().max().float() * 16 / 448 * 1.01).all(), name
    assert not stored
    wanted = _loaded_by_transformers(ours, torch.bfloat16)
    again = _sharded(_wide_on_meta(kind), how)
    assert checkpoint.import_safetensors(again, ours, budget="100KB") == ([], [])
    loaded = _clean(_full(again))
    for name, value in wanted.state_dict().items():
        assert torch.equal(loaded[name], value), name
    _assert_readers_find_scales(ours, kind)
    checkpoint.export_safetensors(again, tmp_path / "numbers", files=[ours / "config.json"])
    assert "quantization_config" not in json.loads((tmp_path / "numbers" / "config.json").read_text())


def _assert_readers_find_scales(folder: Path, kind: str) -> None:
    """Asks transformers which modules it makes for fp8, as on a GPU: exactly those that have scales."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.quantizers.auto import AutoHfQuantizer

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantiser = AutoHfQuantizer.from_config(config, pre_quantized=True)
    model = _wide_on_meta(kind)
    quantiser._normalize_modules_to_not_convert(model)
    left = quantiser.get_modules_to_not_convert(
        model, quantiser.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
    )
    model = replace_with_fp8_linear(model, left, quantiser.quantization_config, pre_quantized=True)
    made = {path for path, module in model.named_modules() if type(module).__name__.startswith("FP8")}
    from safetensors import safe_open

    wanted = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name.endswith(".weight_scale_inv"):
                    name = name.removesuffix(".weight_scale_inv").replace("block_sparse_moe", "mlp")
                    wanted.add(re.sub(r"\.experts\..*", ".experts", name))
    assert made == wanted


def _classifier(dtype: torch.dtype = torch.float32, on: str = "meta") -> Any:
    """Returns a Llama with a head for three classes, which files of one that writes text lack."""
    import transformers

    config = _config("llama")
    config.num_labels, config.pad_token_id, config.initializer_range = 3, 0, 0.5
    with torch.device(on):
        return transformers.AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("how", ["fully_shard hsdp", "flat", "orig"])
@ranks(4)
def test_a_new_head_is_initialised_where_that_is_asked_for(rank, world_size, tmp_path, how):
    if rank == 0:
        _saved("llama", tmp_path)
    dist.barrier()
    model = _sharded(_classifier(), how)
    with pytest.raises(
        RuntimeError, match=r"Missing key.*score.weight(.|\n)*pass initialize=\['score.weight'\]"
    ):
        checkpoint.import_safetensors(model, tmp_path)
    if how == "fully_shard hsdp":  # the wrapper has given it memory
        with pytest.raises(RuntimeError, match=r"on the meta device.*pass initialize=\['score.weight'\]"):
            checkpoint.import_safetensors(model, tmp_path, strict=False)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    for seed in (0, 7):
        options: dict[str, Any] = {"initialize": ["score.weight"], "seed": seed, "budget": 1}
        assert checkpoint.import_safetensors(model, tmp_path, **options) == ([], [])
        assert torch.equal(torch.get_rng_state(), before)
        loaded, wanted = _clean(_full(model)), _classifier(on="cpu")
        torch.manual_seed(seed + zlib.crc32(b"score"))
        wanted._init_weights(wanted.score)
        torch.set_rng_state(before)
        assert torch.equal(loaded["score.weight"], wanted.score.weight)
        assert 0.4 < loaded["score.weight"].std() < 0.6
    theirs = type(wanted).from_pretrained(tmp_path, num_labels=3, dtype=torch.float32).state_dict()
    for name, value in theirs.items():
        assert name == "score.weight" or torch.equal(loaded[name], value), name


def test_what_files_have_is_never_initialised(tmp_path):
    model = _classifier(on="cpu")
    model.save_pretrained(tmp_path)
    again = _classifier()
    assert checkpoint.import_safetensors(again, tmp_path, initialize=["score.weight"]) == ([], [])
    assert torch.equal(again.score.weight, model.score.weight)


def test_a_module_that_is_initialised_by_one_around_it(tmp_path):
    """The biases of a head of BERT are zeros, its weights are not, and each of two layers has its own."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.BertForPreTraining(config)
    lacking = [name for name in model.state_dict() if name.startswith("cls.") and "decoder" not in name]
    checkpoint.import_safetensors(model, tmp_path, initialize=[*lacking, "cls.predictions.decoder.bias"])
    dense, relation = model.cls.predictions.transform, model.cls.seq_relationship
    assert not dense.dense.bias.any() and (dense.LayerNorm.weight == 1).all()
    assert not torch.equal(dense.dense.weight[:2], relation.weight)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    for weight in (dense.dense.weight, relation.weight):
        assert 0.01 < weight.std() < 0.03


def test_initialize_takes_names_of_parameters_alone(tmp_path):
    _saved("llama", tmp_path)
    half: Any = 0.5
    model = _classifier()
    with pytest.raises(ValueError, match="initialize= names score, which the model has no parameter for"):
        checkpoint.import_safetensors(model, tmp_path, initialize=["score"])
    with pytest.raises(
        TypeError, match="initialize must be a list of names of parameters, not 'score.weight'"
    ):
        checkpoint.import_safetensors(model, tmp_path, initialize="score.weight")
    with pytest.raises(TypeError, match="seed must be an int, not 0.5"):
        checkpoint.import_safetensors(model, tmp_path, initialize=["score.weight"], seed=half)
    with pytest.raises(ValueError, match="initialize= is for models of transformers 5"):
        checkpoint.import_safetensors(torch.nn.Linear(2, 2), tmp_path, initialize=["weight"])
    assert all(param.is_meta for param in model.parameters())


def test_what_a_class_does_not_initialise_is_refused(tmp_path, monkeypatch):
    _saved("llama", tmp_path)
    model = _classifier()
    monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification does not initialise score.weight"):
        checkpoint.import_safetensors(model, tmp_path, initialize=["score.weight"])
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("budget", ["256MiB", 1])
def test_blocks_that_end_early_are_dequantised(tmp_path, budget):
    """As the projection of DeepSeek V3 to keys and values, which transformers refuses, and experts."""
    _saved("deepseek_v3", tmp_path)
    meant: dict[str, torch.Tensor] = {}
    block = 48

    def change(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if "_proj" not in name or value.dim() != 2:
            return {name: value}
        rows, columns = value.shape
        scales = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
        codes = value.float().to(FP8)
        spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        meant[name] = (codes.float() * spread).bfloat16()
        return {name: codes, f"{name}_scale_inv": scales}

    _rewrite(tmp_path, change, {"quant_method": "fp8", "weight_block_size": [block, block]})
    model = _on_meta("deepseek_v3", torch.bfloat16)
    assert checkpoint.import_safetensors(model, tmp_path, budget=budget) == ([], [])
    checkpoint.export_safetensors(model, tmp_path / "numbers")
    from safetensors.torch import load_file

    numbers = {
        n: v for path in (tmp_path / "numbers").glob("*.safetensors") for n, v in load_file(path).items()
    }
    assert len(meant) == 28  # of attention, of a layer without experts, and of four experts and a shared one
    for name, value in meant.items():
        assert torch.equal(numbers[name], value), name
