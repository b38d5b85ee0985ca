"""config.json: nulls, wrong types, other names, and what is refused because it is not done."""

import json
from pathlib import Path

import pytest

from cute_moe import __main__ as cli
from cute_moe.checkpoint_config import BLOCK_FP8, PLAIN_EXPERTS, PLAIN_ROUTING, ModelConfig
from cute_moe.checkpoint_files import CheckpointError
from cute_moe.layer import MoELayer
from cute_moe.shapes import LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint

DEFAULTS = {"top_k": 8, "scoring_func": "softmax", "renormalize": True}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
WRONG = (True, -1, 0, 1.5, "256", [], {})


def check_all(fields: object) -> None:
    """Everything that a layer asks of its config."""
    config = ModelConfig(fields)
    config.num_experts()
    config.routing({})
    config.check_experts()
    config.check_shared_expert()


def refused(fields: object) -> str:
    with pytest.raises(CheckpointError) as error:
        check_all(fields)
    return str(error.value)


def test_without_a_config(tmp_path) -> None:
    check_all({})
    config = ModelConfig.read(tmp_path)
    assert config.fields == {} and config.num_experts() is None
    assert config.routing({}) == DEFAULTS


def test_values_of_real_releases() -> None:
    qwen = {
        "text_config": {"num_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu"},
        "quantization_config": {**FP8, "modules_to_not_convert": ["lm_head"]},
    }
    config = ModelConfig(qwen)
    config.check_experts()
    assert config.num_experts() == 256 and config.routing({}) == DEFAULTS
    mixed = {"num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}
    assert ModelConfig(mixed).num_experts() == 8
    assert ModelConfig(mixed).routing({}) == {**DEFAULTS, "top_k": 2, "renormalize": False}
    plain = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
    check_all({**plain, "n_shared_experts": 0, "shared_expert_intermediate_size": 0})


def test_nulls_are_absent() -> None:
    keys = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "scoring_func", "text_config",
            "quantization_config", "n_shared_experts", *PLAIN_EXPERTS, *PLAIN_ROUTING)  # fmt: skip
    nulls = dict.fromkeys(keys)
    for fields in (nulls, {**nulls, "text_config": nulls}):
        check_all(fields)
        assert ModelConfig(fields).routing({}) == DEFAULTS
        assert ModelConfig(fields).num_experts() is None
    hidden = {"num_experts": 256, "text_config": {"num_experts": None}}
    assert ModelConfig(hidden).num_experts() == 256
    check_all({"quantization_config": {**dict.fromkeys(BLOCK_FP8), **FP8, "scale_fmt": None}})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("key", "wrong", "expected"),
    [
        *[("num_experts", value, "a whole number >= 1") for value in WRONG],
        *[("n_routed_experts", value, "a whole number >= 1") for value in WRONG],
        *[("num_experts_per_tok", value, "a whole number >= 1") for value in WRONG],
        *[("norm_topk_prob", value, "true or false") for value in ("true", 1, 0, [True], {})],
        *[("scoring_func", value, '"softmax" or "sigmoid"') for value in ("sqrt", 1, True, [], {})],
        *[("n_group", value, "0 or 1") for value in (8, -1, True, "1", [1])],
        *[("topk_group", value, "0 or 1") for value in (4, False, "1")],
        *[("routed_scaling_factor", value, "1") for value in (2.5, 0, True, "1.0", [])],
        ("route_scale", 2.0, "1"),
        *[("topk_method", value, '"greedy"') for value in ("noaux_tc", "", 1, [])],
        *[("use_routing_bias", value, "false") for value in (True, 0, 1, "false")],
        *[("hidden_act", value, '"silu" or "swish"') for value in ("gelu", "", 1, ["silu"])],
        ("hidden_activation", "gelu_pytorch_tanh", '"silu" or "swish"'),
        *[("swiglu_limit", value, "no such key") for value in (7.0, 0, "7", False)],
        ("swiglu_alpha", 1.702, "no such key"),
        ("expert_dtype", "fp4", '"fp8"'),
        ("zero_expert_num", 128, "0"),
        *[("n_shared_experts", value, "0") for value in (1, True, "0", [])],
        ("shared_expert_intermediate_size", 512, "0"),
        ("compression_config", {"format": "float-quantized"}, "no such key"),
    ],
)  # fmt: skip
def test_each_wrong_value_is_named(key, wrong, expected, nested) -> None:
    text = refused({"text_config": {key: wrong}} if nested else {key: wrong})
    assert text.startswith(f"config.json: {key}: expected {expected}")
    assert text.endswith(f", got {json.dumps(wrong)}")


@pytest.mark.parametrize("key", ["text_config", "quantization_config"])
@pytest.mark.parametrize("wrong", ["fp8", [], 0, False, True, 1.5, ""])
def test_what_is_no_object_is_refused(key, wrong) -> None:
    got = json.dumps(wrong)
    assert refused({key: wrong}) == f"config.json: {key}: expected an object, got {got}"


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *[("quant_method", value) for value in ("compressed-tensors", "modelopt", "awq", "", 8)],
        *[("fmt", value) for value in ("e5m2", "int4", True)],
        *[("activation_scheme", value) for value in ("static", False)],
        *[("weight_block_size", value)
          for value in (128, [128], [64, 64], [128, 128, 128], [1, 128], "128", [True, True], {})],
        ("scale_fmt", "ue8m0"),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused(key, wrong) -> None:
    text = refused({"quantization_config": {**FP8, key: wrong}})
    assert text.startswith(f"config.json: quantization_config.{key}: expected ")
    assert text.endswith(f", got {json.dumps(wrong)}")


def test_a_scale_per_tensor_is_refused() -> None:
    for block_size in ({}, {"weight_block_size": None}):
        fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        text = refused({"quantization_config": {**fields, **block_size}})
        assert "weight_block_size: expected [128, 128], got none" in text
    int4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    assert "weight_block_size" in refused({"quantization_config": int4})


def test_names_that_disagree_are_refused() -> None:
    check_all({"num_experts": 8, "num_local_experts": 8})
    text = refused({"num_experts": 8, "num_local_experts": 16})
    assert text == "config.json: num_local_experts: expected 8 as in num_experts, got 16"


def test_long_values_are_cut() -> None:
    assert len(refused({"num_experts": "x" * 10_000})) < 200


def test_given_routing_comes_first() -> None:
    fields = {"scoring_func": "sqrtsoftplus", "num_experts_per_tok": "8", "norm_topk_prob": 1}
    given = {"top_k": 0, "scoring_func": "sigmoid", "renormalize": False}
    assert ModelConfig(fields).routing(given) == given
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        ModelConfig(fields).routing({**given, "top_k": None})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_config(tmp_path, content, message) -> None:
    path = tmp_path / "config.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": None, "norm_topk_prob": None, "scoring_func": None},
        {"num_experts": "256"},
        {"text_config": []},
        {"quantization_config": "fp8"},
        {"quantization_config": {"weight_block_size": 128}},
    ],
)
def test_no_traceback_in_the_command_line(tmp_path, capsys, fields) -> None:
    write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 256, 128, 1), shards=1)
    (Path(tmp_path) / "config.json").write_text(json.dumps(fields))
    assert cli.main(["demo", "--checkpoint", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    # Nulls leave only the size to complain of.
    assert next(iter(fields)) in line or None in fields.values() and "512..8192, got 256" in line


def test_nulls_make_a_layer_with_the_defaults(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(MoELayer, "_check_weights", lambda self: None)  # any shape
    write_synthetic_checkpoint(tmp_path, 0, LayerShape(2, 256, 128, 1), shards=1)
    nulls = {"num_experts_per_tok": None, "norm_topk_prob": None, "scoring_func": None}
    (tmp_path / "config.json").write_text(json.dumps(nulls))
    layer = MoELayer.from_checkpoint(tmp_path, 0, "cpu", shared_expert="ignore")
    assert (layer.top_k, layer.scoring_func, layer.renormalize) == (8, "softmax", True)
