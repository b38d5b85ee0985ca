"""Checkpoints that would give wrong results or cannot be read: each is refused by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cute_moe import checkpoint, reference
from cute_moe.checkpoint import CheckpointError, LayerTensors, load_layer, usable_device
from cute_moe.checkpoint_files import INDEX_NAME
from cute_moe.shapes import LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint

E, K, N = 2, 256, 128
LAYER = 1
PREFIX = f"model.layers.{LAYER}.mlp"
FILE = "model.safetensors"

Tensors = dict[str, torch.Tensor]


def experts(prefix: str = PREFIX) -> Tensors:
    tensors = {f"{prefix}.gate.weight": torch.ones(E, K).bfloat16()}
    for e in range(E):
        for name, rows, columns in (("gate", N, K), ("up", N, K), ("down", K, N)):
            full = f"{prefix}.experts.{e}.{name}_proj.weight"
            tensors[full] = torch.ones(rows, columns).to(reference.E4M3)
            tensors[f"{full}_scale_inv"] = torch.ones(rows // 128, columns // 128)
    return tensors


def packed(prefix: str = PREFIX) -> Tensors:
    return {
        f"{prefix}.experts.gate_up_proj": torch.ones(E, 2 * N, K).to(reference.E4M3),
        f"{prefix}.experts.gate_up_proj_scale_inv": torch.ones(E, 2, 2),
        f"{prefix}.experts.down_proj": torch.ones(E, K, N).to(reference.E4M3),
        f"{prefix}.experts.down_proj_scale_inv": torch.ones(E, 2, 1),
    }


def save(tensors: Tensors, folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def refused(folder: Path, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        load_layer(folder, LAYER, **options)
    return str(error.value)


@pytest.mark.parametrize("config", [None, {}, {"topk_method": None}, {"topk_method": "greedy"}])
@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}.gate.e_score_correction_bias",
        f"{PREFIX}.e_score_correction_bias",
        f"{PREFIX}.moe_statics.e_score_correction_bias",
        f"model.layers.{LAYER}.block_sparse_moe.e_score_correction_bias",
        f"model.layers.{LAYER}.e_score_correction_bias",
    ],
)
def test_a_bias_of_the_router_is_refused(tmp_path, name, config) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    for shared in ("refuse", "ignore"):
        save(experts() | {name: torch.zeros(E)}, tmp_path)
        text = refused(tmp_path, shared_expert=shared)
        assert text.startswith(f"{name}: a routing with a bias per expert is not supported")


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model."])
def test_a_bias_is_named_where_the_experts_have_another_name(tmp_path, prefix) -> None:
    block = f"{prefix}layers.{LAYER}.block_sparse_moe"
    names = (f"{block}.experts.0.w1.weight", f"{block}.e_score_correction_bias")
    save({name: torch.zeros(E) for name in names}, tmp_path)
    assert refused(tmp_path).startswith(f"{names[1]}: a routing with a bias per expert")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gate.bias", "a bias is not supported"),
        ("experts.1.up_proj.bias", "a bias is not supported"),
        ("experts.0.gate_proj.weight_scale", "scales that are not weight_scale_inv"),
        ("experts.0.down_proj.input_scale", "activations with a scale"),
        ("experts.0.down_proj.activation_scale", "activations with a scale"),
        ("experts.0.down_proj.weight_packed", "this part of an MoE layer"),
        ("experts.0.gate_proj.weight_zero_point", "this part of an MoE layer"),
        ("experts.gate_up_proj_bias", "this part of an MoE layer"),
        ("experts.0.gate_proj.lora_A.weight", "this part of an MoE layer"),
        ("zero_experts.0.weight", "this part of an MoE layer"),
        ("router.weight", "this part of an MoE layer"),
        ("gate.weight_scale_inv", "this part of an MoE layer"),
        ("shared_mlp.gate_proj.weight", "a shared expert is not supported"),
        ("fc1_latent_proj.weight", "this part of an MoE layer"),
    ],
)
@pytest.mark.parametrize("layout", [experts, packed])
def test_every_other_tensor_of_the_layer_is_refused(tmp_path, layout, name, reason) -> None:
    save(layout() | {f"{PREFIX}.{name}": torch.zeros(N, 1)}, tmp_path)
    text = refused(tmp_path, shared_expert="ignore")
    assert text.startswith(f"{PREFIX}.{name}: {reason}")


def test_other_parts_of_the_model_do_not_matter(tmp_path) -> None:
    other = (f"model.layers.{LAYER}.input_layernorm.weight", f"model.layers.{LAYER}0.mlp.gate.bias",
             f"model.layers.{LAYER}.self_attn.q_proj.bias", "model.layers.0.mlp.shared_expert.x",
             "mtp.layers.1.mlp.gate.e_score_correction_bias", "lm_head.weight")  # fmt: skip
    save(experts() | {name: torch.zeros(1) for name in other}, tmp_path)
    assert load_layer(tmp_path, LAYER).w_up.shape == (E, 2 * N, K)


def test_one_layout_hides_no_other(tmp_path) -> None:
    save(experts() | packed(), tmp_path)
    assert refused(tmp_path).startswith(f"{PREFIX}.experts.0.")


@pytest.mark.parametrize("part", ["shared_expert", "shared_experts", "shared_expert_gate"])
def test_a_shared_expert_is_refused_unless_ignored(tmp_path, part) -> None:
    name = f"{PREFIX}.{part}.weight"
    save(experts() | {name: torch.zeros(1, K)}, tmp_path)
    text = refused(tmp_path)
    assert text.startswith(f"{name}: a shared expert is not supported")
    assert 'shared_expert="ignore"' in text
    assert load_layer(tmp_path, LAYER, shared_expert="ignore").w_up.shape == (E, 2 * N, K)


def test_a_shared_expert_of_the_config_is_refused_unless_ignored(tmp_path) -> None:
    save(experts(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"n_shared_experts": 1}))
    assert "n_shared_experts: expected 0" in refused(tmp_path)
    assert load_layer(tmp_path, LAYER, shared_expert="ignore").w_up.shape == (E, 2 * N, K)


@pytest.mark.parametrize("option", ["fuse", "", None, True, ["ignore"]])
def test_wrong_options_for_the_shared_expert(tmp_path, option) -> None:
    with pytest.raises(ValueError, match="shared_expert: expected 'refuse' or 'ignore', got"):
        load_layer(tmp_path, LAYER, shared_expert=option)


@pytest.mark.parametrize("config", [{"hidden_act": "gelu"}, {"swiglu_limit": 7.0},
                                    {"quantization_config": {"quant_method": "awq"}}])  # fmt: skip
def test_other_arithmetic_is_refused(tmp_path, config) -> None:
    save(experts(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert next(iter(config)) in refused(tmp_path)


@pytest.mark.parametrize("shape", [(N, 1), (1, 1), (1,), ()])
def test_scales_that_are_not_per_block_are_refused(tmp_path, shape) -> None:
    name = f"{PREFIX}.experts.1.up_proj.weight_scale_inv"
    save(experts() | {name: torch.ones(shape)}, tmp_path)
    assert refused(tmp_path).startswith(f"{name}: expected float32 [1, 2], got")


@pytest.mark.parametrize("layout", [experts, packed])
def test_more_experts_than_the_config_says(tmp_path, layout) -> None:
    save(layout(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 1}))
    assert refused(tmp_path) == (
        f"{PREFIX}.experts: expected 1 experts, as config.json says; got 2"
    )


@pytest.mark.parametrize(
    ("prefixes", "held"),
    [
        (["mtp.layers.1.mlp"], "MoE layers 1 under mtp.layers.L.mlp.experts"),
        (["language_model.model.layers.1.mlp", "language_model.model.layers.2.mlp"],
         "MoE layers 1-2 under language_model.model.layers.L.mlp.experts"),
        (["layers.1.mlp"], "MoE layers 1 under layers.L.mlp.experts"),
        (["model.layers.1.block_sparse_moe"],
         "MoE layers 1 under model.layers.L.block_sparse_moe.experts"),
        (["model.layers.1.feed_forward"], "MoE layers 1 under model.layers.L.feed_forward.experts"),
        (["transformer.h.1.moe"], "MoE layers 1 under transformer.h.L.moe.experts"),
        (["model.layers.0.mlp", "mtp.layers.1.mlp"],
         "MoE layers 0 under model.layers.L.mlp.experts and 1 under mtp.layers.L.mlp.experts"),
        (["mlp"], "no MoE layer"),
    ],
)  # fmt: skip
def test_the_prefixes_found_are_named(tmp_path, prefixes, held) -> None:
    names = [f"{prefix}.experts.0.up_proj.weight" for prefix in prefixes]
    place = dict.fromkeys(names, FILE)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": place}))
    text = refused(tmp_path)
    assert text.startswith("layer 1: expected tensors under model.language_model.layers.1.mlp.")
    assert text.endswith(f"; {tmp_path} holds {held}")


@pytest.mark.parametrize("layer", [-1, True, False, 1.0, "1", None, [1]])
def test_wrong_layers(tmp_path, layer) -> None:
    save(experts(), tmp_path)
    with pytest.raises(ValueError, match="layer: expected an int >= 0, got"):
        load_layer(tmp_path, layer)
    with pytest.raises(ValueError, match="layer: expected an int >= 0, got"):
        write_synthetic_checkpoint(tmp_path / "new", layer, LayerShape(2, 256, 128, 1), shards=1)


def test_zero_is_a_gpu(tmp_path, monkeypatch) -> None:
    save(experts(), tmp_path)
    wanted = []
    empty = torch.empty

    def at_hand(*sizes, device, **options):
        wanted.append(torch.device(device))
        return empty(*sizes, device="meta", **options)

    monkeypatch.setattr(checkpoint.torch, "empty", at_hand)
    load_layer(tmp_path, LAYER, 0)
    assert wanted[0] == torch.device("cuda:0")
    load_layer(tmp_path, LAYER, 1)
    assert torch.device("cuda:1") in wanted


@pytest.mark.gpu
@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)])
def test_zero_is_a_gpu_on_one(cuda, tmp_path, device) -> None:
    save(experts(), tmp_path)
    assert load_layer(tmp_path, LAYER, device).w_up.device == torch.device("cuda:0")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 99, -1, "", "cuda:x"])
def test_devices_that_are_not_there(tmp_path, device) -> None:
    with pytest.raises(ValueError, match="^device: expected one that torch can use here, got"):
        load_layer(tmp_path, LAYER, device)
    for wrong in (True, False, 0.0, [0]):
        with pytest.raises(TypeError, match=r"^device: expected a torch\.device, str or int, got"):
            usable_device(wrong)


@pytest.mark.parametrize("file", [5, None, True, [FILE], {}, "", ".", "..", "../x.safetensors",
                                  "/etc/passwd", "a/../../x.safetensors"])  # fmt: skip
def test_index_entries_that_name_no_file_of_the_folder(tmp_path, file) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(experts(), tmp_path)
    (tmp_path / FILE).rename(tmp_path / "x.safetensors")
    place = {**dict.fromkeys(experts(), "x.safetensors"), f"{PREFIX}.gate.weight": file}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": place}))
    text = refused(folder)
    assert f"weight_map: {PREFIX}.gate.weight: expected the name of a file" in text
    assert text.endswith(f"got {file!r}")


def test_files_behind_links_are_read(tmp_path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(experts(), tmp_path)
    (folder / "part.safetensors").symlink_to(tmp_path / FILE)
    place = dict.fromkeys(experts(), "part.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": place}))
    assert isinstance(load_layer(folder, LAYER), LayerTensors)


def test_a_tensor_in_two_files_is_refused(tmp_path) -> None:
    save(experts(), tmp_path)
    save_file({f"{PREFIX}.gate.weight": torch.zeros(E, K)}, tmp_path / "other.safetensors")
    text = refused(tmp_path)
    assert text.startswith(f"{PREFIX}.gate.weight: expected in one file")
    assert FILE in text and "other.safetensors" in text


def test_damaged_files(tmp_path) -> None:
    save(experts(), tmp_path)
    path = tmp_path / FILE
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:4], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        assert refused(tmp_path).startswith(f"{path}: not a safetensors file")
    path.unlink()
    path.mkdir()
    assert refused(tmp_path).startswith(f"{path}: not a safetensors file")


def test_dtypes_that_torch_does_not_have(tmp_path) -> None:
    name = f"{PREFIX}.experts.0.gate_proj.weight"
    entry = {name: {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    header = json.dumps(entry).encode()
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    assert refused(tmp_path).startswith(name)
