"""What config.json says of the MoE layers, every value checked.

A null counts as absent. What would change the arithmetic and is not done here is refused by the
name of its key, so that a checkpoint either runs as its model means it or does not load.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_moe.checkpoint_files import CheckpointError, checkpoint_path, read_json
from cute_moe.reference import BLOCK, SCORING_FUNCS

Fields = dict[str, Any]
DEFAULT_TOP_K = 8


@dataclass(frozen=True)
class _Kind:
    """A type of value: the test of it, and its name in an error."""

    fits: Callable[[Any], bool]
    name: str


_COUNT = _Kind(lambda v: type(v) is int and v >= 1, "a whole number >= 1")
_FLAG = _Kind(lambda v: type(v) is bool, "true or false")
_SCORING = _Kind(lambda v: v in SCORING_FUNCS, " or ".join(map(json.dumps, SCORING_FUNCS)))

# Other models write the same thing under other names.
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk",
         "moe_top_k")  # fmt: skip
SCORING_FUNC = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight")

# What is done of each key; another value than these is refused. () is a key that none may have.
PLAIN_EXPERTS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "act_fn"),
                    ("silu", "swish")),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta", "gate_softcap", "up_softcap"),
                    ()),
    "expert_dtype": ("fp8",),
    "moe_latent_size": (),
    "zero_expert_num": (0,),
    "compression_config": (),
}  # fmt: skip
PLAIN_ROUTING: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), (0, 1)),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale",
                     "moe_router_scaling_factor"), (1,)),
    "topk_method": ("greedy",),
    **dict.fromkeys(("use_routing_bias", "use_expert_bias", "moe_router_enable_expert_bias",
                     "router_bias", "use_grouped_topk"), (False,)),
    "router_logit_softcapping": (0,),
    "apply_router_weight_on_input": (False,),
}  # fmt: skip
PLAIN_SHARED: dict[str, tuple[object, ...]] = dict.fromkeys(
    ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts",
     "shared_expert_intermediate_size"), (0,),
)  # fmt: skip
BLOCK_FP8: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "scale_fmt": (),  # "ue8m0": the scales of the activations are powers of two as well
}


class ModelConfig:
    """The fields of a config.json, those of its `text_config` on top, without nulls.

    Every method raises CheckpointError, which names the key, what was expected and what came.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None, source: str = "config.json"):
        """Checks nothing but `text_config`; no fields: a checkpoint without a config.json."""
        self._source = source
        fields = dict(fields or {})
        self.fields: Fields = {**_without_nulls(fields), **self._object(fields, "text_config")}

    @classmethod
    def read(cls, directory: str | Path) -> "ModelConfig":
        """The config of a checkpoint folder; an empty one where there is no config.json."""
        path = checkpoint_path(directory) / "config.json"
        return cls(read_json(path), str(path)) if path.exists() else cls()

    def num_experts(self) -> int | None:
        """Experts of a layer; None when the config does not say."""
        return self._value(NUM_EXPERTS, _COUNT)

    def check_experts(self) -> None:
        """Raises unless the experts are SwiGLU with block-FP8 weights, as far as the config says.

        A config without quantization_config says nothing of the weights.
        """
        self._check_plain(self.fields, PLAIN_EXPERTS, "")
        if "quantization_config" not in self.fields:
            return
        quantization = self._object(self.fields, "quantization_config")
        self._check_plain(quantization, BLOCK_FP8, "quantization_config.")
        if "weight_block_size" not in quantization:
            raise self._error(
                "quantization_config.weight_block_size",
                f"[{BLOCK}, {BLOCK}]",
                "none, which means one scale per tensor",
            )

    def check_shared_expert(self) -> None:
        """Raises when the layers have a shared expert."""
        self._check_plain(self.fields, PLAIN_SHARED, "")

    def routing(self, given: Mapping[str, Any]) -> Fields:
        """top_k, scoring_func and renormalize: those of `given` that are not None, else the
        config's, else 8, "softmax", True.

        Raises as well when the model routes in a way that no such triple describes.
        """
        self._check_plain(self.fields, PLAIN_ROUTING, "")
        known = {
            "top_k": (TOP_K, _COUNT, DEFAULT_TOP_K),
            "scoring_func": (SCORING_FUNC, _SCORING, "softmax"),
            "renormalize": (RENORMALIZE, _FLAG, True),
        }
        routing = {}
        for name, (keys, kind, default) in known.items():
            value = given.get(name)
            if value is None:
                value = self._value(keys, kind)
            routing[name] = default if value is None else value
        return routing

    def _value(self, keys: tuple[str, ...], kind: _Kind) -> Any:
        """The value of the only one of `keys` that is there (or of several that agree), or None."""
        found = {key: self.fields[key] for key in keys if key in self.fields}
        for key, value in found.items():
            if not kind.fits(value):
                raise self._error(key, kind.name, _text(value))
        for key, value in found.items():
            first = next(iter(found))
            if value != found[first]:
                raise self._error(key, f"{_text(found[first])} as in {first}", _text(value))
        return next(iter(found.values()), None)

    def _object(self, fields: Fields, key: str) -> Fields:
        """The object under `key`, without nulls; {} when it is absent."""
        value = fields.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._error(key, "an object", _text(value))
        return _without_nulls(value)

    def _check_plain(
        self, fields: Fields, plain: Mapping[str, tuple[object, ...]], path: str
    ) -> None:
        for key, values in plain.items():
            if key in fields and not any(_same(fields[key], value) for value in values):
                expected = " or ".join(_text(value) for value in values) or "no such key"
                expected += " (nothing else is supported)"
                raise self._error(path + key, expected, _text(fields[key]))

    def _error(self, key: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {key}: expected {expected}, got {got}")


def _without_nulls(fields: Mapping[str, Any]) -> Fields:
    return {key: value for key, value in fields.items() if value is not None}


def _same(value: object, other: object) -> bool:
    """Equality in JSON: 1 is 1.0, but true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _text(value: object) -> str:
    """A value as in the file, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
