"""Reading layers: both layouts, both prefixes, both scale dtypes, and the errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cute_moe import checkpoint, reference
from cute_moe.checkpoint import CheckpointError, load_layer
from cute_moe.checkpoint_config import ModelConfig
from cute_moe.checkpoint_files import INDEX_NAME
from cute_moe.shapes import LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint

E, K, N = 4, 256, 128
LAYER = 3
PREFIXES = [prefix.format(LAYER) for prefix in checkpoint.LAYER_PREFIXES]

Tensors = dict[str, torch.Tensor]


def random_layer(scale_dtype: torch.dtype = torch.float32) -> Tensors:
    """What the loader should give back, by the names of its fields."""
    w_up, s_up = reference.quantize_blocks(torch.randn(E, 2 * N, K))
    w_down, s_down = reference.quantize_blocks(torch.randn(E, K, N))
    router = torch.randn(E, K).bfloat16()
    scales = {"s_up": s_up.to(scale_dtype), "s_down": s_down.to(scale_dtype)}
    return {"w_up": w_up, "w_down": w_down, **scales, "router_weight": router}


def packed(layer: Tensors, prefix: str) -> Tensors:
    experts = f"{prefix}.experts"
    return {
        f"{experts}.gate_up_proj": layer["w_up"],
        f"{experts}.gate_up_proj_scale_inv": layer["s_up"],
        f"{experts}.down_proj": layer["w_down"],
        f"{experts}.down_proj_scale_inv": layer["s_down"],
        f"{prefix}.gate.weight": layer["router_weight"],
    }


def per_expert(layer: Tensors, prefix: str) -> Tensors:
    tensors = {f"{prefix}.gate.weight": layer["router_weight"]}
    half = N // 128
    for e in range(E):
        name = f"{prefix}.experts.{e}."
        tensors |= {
            f"{name}gate_proj.weight": layer["w_up"][e, :N],
            f"{name}gate_proj.weight_scale_inv": layer["s_up"][e, :half],
            f"{name}up_proj.weight": layer["w_up"][e, N:],
            f"{name}up_proj.weight_scale_inv": layer["s_up"][e, half:],
            f"{name}down_proj.weight": layer["w_down"][e],
            f"{name}down_proj.weight_scale_inv": layer["s_down"][e],
        }
    return tensors


def save(tensors: Tensors, folder: Path, shards: int = 1) -> None:
    """One file, or an index and `shards` files with the tensors dealt out in turn."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    place = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(place.values()):
        save_file({n: tensors[n] for n in names if place[n] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": place}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scale_dtype", checkpoint.SCALE_DTYPES)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", [per_expert, packed])
def test_every_layout_reads_back(tmp_path, layout, prefix, scale_dtype, shards) -> None:
    want = random_layer(scale_dtype)
    other = random_layer(scale_dtype)  # another layer in the same files
    save(layout(want, prefix) | layout(other, prefix.replace("3", "30")), tmp_path, shards)
    got = load_layer(tmp_path, LAYER)
    for name, tensor in want.items():
        found = getattr(got, name)
        assert found.dtype == tensor.dtype and found.is_contiguous()
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_result_outlives_the_files(tmp_path) -> None:
    want = random_layer()
    save(per_expert(want, PREFIXES[0]), tmp_path)
    got = load_layer(tmp_path, LAYER)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # in place: a mapping would see the zeros
    assert torch.equal(got.router_weight, want["router_weight"])
    assert torch.equal(got.w_up.float(), want["w_up"].float())


def test_router_may_be_absent(tmp_path) -> None:
    tensors = packed(random_layer(), PREFIXES[1])
    del tensors[f"{PREFIXES[1]}.gate.weight"]
    save(tensors, tmp_path)
    assert load_layer(tmp_path, LAYER).router_weight is None


@pytest.mark.parametrize("layout", [per_expert, packed])
def test_each_missing_tensor_is_named(tmp_path, layout) -> None:
    tensors = layout(random_layer(), PREFIXES[0])
    for name, tensor in tensors.items():
        if name.endswith("gate.weight"):
            continue  # the router may be absent
        save({n: t for n, t in tensors.items() if n != name}, tmp_path)
        with pytest.raises(CheckpointError, match="expected") as error:
            load_layer(tmp_path, LAYER)
        assert str(error.value).startswith(f"{name}: not in {tmp_path}")
        if ".0.gate_proj" not in name and "gate_up_proj" not in name:  # those give the sizes
            assert str(list(tensor.shape)) in str(error.value)


def test_config_tells_that_the_last_expert_is_missing(tmp_path) -> None:
    tensors = per_expert(random_layer(), PREFIXES[0])
    save({n: t for n, t in tensors.items() if ".experts.3." not in n}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_experts": E}}))
    with pytest.raises(CheckpointError, match=r"experts\.3\.gate_proj\.weight: not in"):
        load_layer(tmp_path, LAYER)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("experts.2.up_proj.weight", torch.zeros(N, K + 128).to(reference.E4M3), f"[{N}, {K}]"),
        ("experts.1.down_proj.weight", torch.zeros(K, N).bfloat16(), "float8_e4m3fn"),
        ("experts.0.gate_proj.weight", torch.zeros(N, K).bfloat16(), "float8_e4m3fn"),
        ("experts.3.down_proj.weight_scale_inv", torch.ones(1, 2), "float32 [2, 1]"),
        ("experts.3.up_proj.weight_scale_inv", torch.ones(1, 2).bfloat16(), "float32 [1, 2]"),
        ("experts.0.gate_proj.weight_scale_inv", torch.ones(1, 2).half(), "float32 or bfloat16"),
        ("gate.weight", torch.zeros(E, K + 1).bfloat16(), f"[{E}, {K}]"),
    ],
)
def test_each_misshapen_tensor_is_named(tmp_path, name, tensor, expected) -> None:
    full = f"{PREFIXES[0]}.{name}"
    save(per_expert(random_layer(), PREFIXES[0]) | {full: tensor}, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_layer(tmp_path, LAYER)
    text = str(error.value)
    assert text.startswith(f"{full}: expected ")
    assert expected in text and str(list(tensor.shape)) in text and "model.safetensors" in text


def test_misshapen_packed_tensors(tmp_path) -> None:
    experts = f"{PREFIXES[0]}.experts"
    tensors = packed(random_layer(), PREFIXES[0])
    wrong = tensors[f"{experts}.down_proj"][:, :128]
    save(tensors | {f"{experts}.down_proj": wrong}, tmp_path)
    with pytest.raises(CheckpointError, match=r"down_proj: expected .*\[4, 256, 128\], got"):
        load_layer(tmp_path, LAYER)
    save(tensors | {f"{experts}.gate_up_proj": tensors[f"{experts}.gate_up_proj"][0]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: expected \[E, 2N, K\]"):
        load_layer(tmp_path, LAYER)


def test_unquantised_release_says_what_is_needed(tmp_path) -> None:
    tensors = packed(random_layer(), PREFIXES[0])
    plain = {n: t.to(torch.bfloat16) for n, t in tensors.items() if "scale_inv" not in n}
    save(plain, tmp_path)
    with pytest.raises(CheckpointError, match="expected block-FP8 weights .* FP8 release"):
        load_layer(tmp_path, LAYER)


def test_sizes_must_be_multiples_of_128(tmp_path) -> None:
    tensors = packed(random_layer(), PREFIXES[0])
    name = f"{PREFIXES[0]}.experts.gate_up_proj"
    save(tensors | {name: tensors[name][:, :192]}, tmp_path)
    with pytest.raises(CheckpointError, match="intermediate size to be a multiple of 128, got 96"):
        load_layer(tmp_path, LAYER)


def test_layer_that_is_not_there(tmp_path) -> None:
    tensors = per_expert(random_layer(), PREFIXES[0])
    for layer in (0, 1, 7):
        moved = {n.replace("layers.3.", f"layers.{layer}."): t for n, t in tensors.items()}
        save(moved, tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / f"part-{layer}.safetensors")
    with pytest.raises(CheckpointError, match=r"layer 3: .* holds MoE layers 0-1, 7 under"):
        load_layer(tmp_path, LAYER)
    assert load_layer(tmp_path, 7).w_up.shape == (E, 2 * N, K)  # several files, no index


def test_directories_that_are_no_checkpoint(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="found neither"):
        load_layer(tmp_path, LAYER)
    for path in (tmp_path / "absent", __file__, ""):
        with pytest.raises(CheckpointError, match="expected the folder of a checkpoint, got"):
            load_layer(path, LAYER)
    for path in (None, 0, b"model"):
        with pytest.raises(TypeError, match="directory: expected a str or a Path, got"):
            load_layer(path, LAYER)
    (tmp_path / "model.safetensors").write_bytes(b"no such format")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        load_layer(tmp_path, LAYER)
    name = f"{PREFIXES[0]}.experts.gate_up_proj"
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {name: "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: named by"):
        load_layer(tmp_path, LAYER)
    save_file({"x": torch.zeros(1)}, tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_up_proj: cannot be read from"):
        load_layer(tmp_path, LAYER)
    for text, message in (("{", "not valid JSON"), ("[]", "JSON object"), ("{}", "weight_map")):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_layer(tmp_path, LAYER)


def test_other_block_sizes_are_refused(tmp_path) -> None:
    save(packed(random_layer(), PREFIXES[0]), tmp_path)
    config = {"quantization_config": {"weight_block_size": [64, 64]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"expected \[128, 128\] .*, got \[64, 64\]"):
        load_layer(tmp_path, LAYER)


def test_synthetic_checkpoint(tmp_path) -> None:
    shape = LayerShape(num_experts=6, hidden=512, intermediate=256, top_k=2)
    write_synthetic_checkpoint(tmp_path / "a", LAYER, shape, seed=5, shards=3)
    write_synthetic_checkpoint(tmp_path / "b", LAYER, shape, seed=5, shards=3)
    write_synthetic_checkpoint(tmp_path / "c", LAYER, shape, seed=6, shards=3)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        INDEX_NAME,
    ]  # fmt: skip
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    config = ModelConfig.read(tmp_path / "a")
    assert (config.num_experts(), config.routing({})["top_k"]) == (6, 2)
    assert config.fields["quantization_config"]["weight_block_size"] == [128, 128]
    config.check_experts()

    layer = load_layer(tmp_path / "a", LAYER, shared_expert="ignore")
    assert layer.w_up.shape == (6, 512, 512) and layer.w_down.shape == (6, 512, 256)
    assert layer.s_up.dtype == torch.bfloat16 and layer.router_weight.shape == (6, 512)
    for w, s in ((layer.w_up, layer.s_up), (layer.w_down, layer.s_down)):
        values = reference.dequantize_blocks(w, s)
        assert values.isfinite().all() and w.float().abs().max() == 448.0
        assert 0.018 < values.std() < 0.023 and abs(values.mean()) < 1e-3
    first, second = layer.w_up.float()[:2]
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02
    other = load_layer(tmp_path / "c", LAYER, shared_expert="ignore")
    assert not torch.equal(other.w_up.float(), layer.w_up.float())


def test_synthetic_checkpoint_has_the_tensors_of_the_model(tmp_path) -> None:
    write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 256, 128, 1), shards=2)
    prefix = "model.language_model.layers.0.mlp"
    projections = [
        f"{p}_proj.weight{s}" for p in ("gate", "up", "down") for s in ("", "_scale_inv")
    ]
    want = {f"{prefix}.gate.weight", f"{prefix}.shared_expert_gate.weight"}
    for part in ("experts.0", "experts.1", "shared_expert"):
        want |= {f"{prefix}.{part}.{name}" for name in projections}
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert set(index["weight_map"]) == want
    sizes = 0
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        sizes += sum(t.nbytes for t in tensors.values())
        with safe_open(path, "pt") as file:
            assert all(index["weight_map"][name] == path.name for name in file.keys())  # noqa: SIM118
    assert index["metadata"]["total_size"] == sizes


def test_synthetic_checkpoint_refuses_bad_sizes(tmp_path) -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 200, 128, 1))
    with pytest.raises(ValueError, match=r"shards: expected 1\.\.2, got 4"):
        write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 256, 128, 1), shards=4)
    for wrong in ((2, 0, 128, 1), (2, 256, 0, 1), (2, -128, 128, 1)):
        with pytest.raises(ValueError, match="multiples of 128"):
            write_synthetic_checkpoint(tmp_path, 0, LayerShape(*wrong), shards=1)
    for wrong in ((0, 256, 128, 1), (2, 256, 128, 3), (2, 256, 128, 0)):
        with pytest.raises(ValueError, match="expected 1 <= top_k <= num_experts"):
            write_synthetic_checkpoint(tmp_path, 0, LayerShape(*wrong), shards=1)
    with pytest.raises(ValueError, match="seed: expected an int >= 0, got -1"):
        write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 256, 128, 1), seed=-1, shards=1)
    assert not list(tmp_path.iterdir())
