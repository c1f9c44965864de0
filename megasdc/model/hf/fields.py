"""Translation of a Hugging Face ``config.json`` to a ``model`` section; every value in it is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megasdc.common.errors import ConfigError
from megasdc.model.hf.classes import SUPPORTED

_ACTIVATIONS_BACK = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


class _Reader:
    """Reads values of a ``config.json``; a value of a wrong type is added to ``problems``, and its default is used."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def whole(self, key: str, default: int | None) -> Any:
        """A whole number above 0; null is allowed if the default is None."""
        value = self.config.get(key, default)
        if value is None and default is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        return self._wrong(key, value, "a whole number above 0", default or 1)

    def number(self, key: str, default: float) -> float:
        """A finite number, at least 0."""
        value = self.config.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        return float(self._wrong(key, value, "a number from 0 on", default))

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key, default)
        return value if isinstance(value, bool) else bool(self._wrong(key, value, "true or false", default))

    def choice(self, key: str, default: str, allowed: Mapping[str, str]) -> str:
        """The value that ``allowed`` has for a name."""
        value = self.config.get(key, default)
        if isinstance(value, str) and value in allowed:
            return allowed[value]
        return allowed[self._wrong(key, value, f"one of {', '.join(allowed)}", default)]

    def require(self, key: str, value: bool) -> None:
        """Report a switch with another value than ``value``, its default."""
        if self.switch(key, value) != value:
            self.problems.append(f"{key}: got {self.config[key]!r}; supported is {value!r}.")

    def _wrong(self, key: str, value: Any, wanted: str, instead: Any) -> Any:
        self.problems.append(f"{key}: got {value!r}; needed is {wanted}.")
        return instead


def architecture(config: Mapping[str, Any]) -> str:
    """The class of ``transformers`` in a ``config.json``, or its ``model_type`` if it names no class.

    Raises:
        ConfigError: ``architectures`` is not a list of names.
    """
    names = config.get("architectures") or [str(config.get("model_type"))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures: got {names!r}; needed is a list of names.", "config.json of the model")
    return str(names[0])


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the ``model`` section for a ``config.json``.

    Args:
        config: its content; missing keys have the defaults of ``transformers``.

    Raises:
        ConfigError: the architecture or settings are not supported; lists each.
    """
    kind, name = config.get("model_type"), architecture(config)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"model_type: got {kind!r} ({name}); supported are {SUPPORTED}.", "config.json of the model")
    read = _Reader(config)
    if config.get("quantization_config"):
        read.problems.append("quantization_config: quantized weights are not supported; dequantize the model first.")
    fields = _gpt2_fields(read) if kind == "gpt2" else _llama_fields(read)
    if read.problems:
        raise ConfigError([*read.problems, f"Supported are {SUPPORTED}."], "config.json of the model")
    return fields


def vocabulary(config: Mapping[str, Any]) -> int:
    """Vocabulary size in a checked ``config.json``, or the default of ``transformers``.

    Raises:
        ConfigError: it is not a whole number above 0.
    """
    read = _Reader(config)
    found = int(read.whole("vocab_size", 50257 if config.get("model_type") == "gpt2" else 32000))
    if read.problems:
        raise ConfigError(read.problems, "config.json of the model")
    return found


def special_token_ids(config: Mapping[str, Any]) -> dict[str, int | list[int] | None]:
    """Ids of special tokens in a ``config.json``, by its keys; without those that it has not.

    Raises:
        ConfigError: one is neither an id, nor a list of them, nor null.
    """
    found = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    problems = [
        f"{key}: got {value!r}; needed is an id, a list of ids, or null."
        for key, value in found.items()
        if value is not None and not all(type(one) is int for one in (value if isinstance(value, list) else [value]))
    ]
    if problems:
        raise ConfigError(problems, "config.json of the model")
    return found


def _gpt2_fields(read: _Reader) -> dict[str, Any]:
    read.require("scale_attn_weights", True)
    read.require("scale_attn_by_inverse_layer_idx", False)
    read.require("add_cross_attention", False)
    hidden = read.whole("n_embd", 768)
    return {
        "num_layers": read.whole("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": read.whole("n_head", 12),
        "ffn_hidden_size": read.whole("n_inner", None) or 4 * hidden,
        "max_positions": read.whole("n_positions", 1024),
        "position_embedding": "learned",
        "normalization": "LayerNorm",
        "norm_epsilon": read.number("layer_norm_epsilon", 1e-5),
        "activation": read.choice("activation_function", "gelu_new", _ACTIVATIONS_BACK),
        "gated_mlp": False,
        "bias": True,
        "tie_embeddings": read.switch("tie_word_embeddings", True),
        "hidden_dropout": read.number("resid_pdrop", 0.1),
        "attention_dropout": read.number("attn_pdrop", 0.1),
        "init_std": read.number("initializer_range", 0.02),
    }


def _llama_fields(read: _Reader) -> dict[str, Any]:
    attention_bias, mlp_bias = read.switch("attention_bias", False), read.switch("mlp_bias", False)
    if mlp_bias and not attention_bias:
        read.problems.append("mlp_bias: got true without attention_bias; supported are both, or attention_bias alone.")
    hidden, heads = read.whole("hidden_size", 4096), read.whole("num_attention_heads", 32)
    groups = read.whole("num_key_value_heads", None) or heads
    if heads % groups:
        read.problems.append(f"num_key_value_heads: got {groups}; needed is a divisor of num_attention_heads {heads}.")
    return {
        "num_layers": read.whole("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": read.whole("head_dim", None) or max(1, hidden // heads),
        "ffn_hidden_size": read.whole("intermediate_size", 11008),
        "max_positions": read.whole("max_position_embeddings", 2048),
        "position_embedding": "rope",
        "rotary_base": _rotary_base(read),
        "normalization": "RMSNorm",
        "norm_epsilon": read.number("rms_norm_eps", 1e-6),
        "activation": read.choice("hidden_act", "silu", _ACTIVATIONS_BACK),
        "gated_mlp": True,
        "bias": attention_bias and mlp_bias,
        "qkv_bias": attention_bias and not mlp_bias,
        "tie_embeddings": read.switch("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": read.number("attention_dropout", 0.0),
        "init_std": read.number("initializer_range", 0.02),
    }


_ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of the rotation's settings, of transformers 5 and of earlier versions; which counts depends on the version."""
_NEUTRAL = {"partial_rotary_factor": 1.0, "factor": 1.0, "attention_factor": 1.0}
"""Values of further keys of these with which the angles are those of type ``default``."""


def _rotary_base(read: _Reader) -> int:
    """The base of the rotary angles, from the keys of transformers 5 and the older ones, which must agree."""
    bases = {"rope_theta": read.config["rope_theta"]} if "rope_theta" in read.config else {}
    if (part := read.config.get("partial_rotary_factor")) not in (None, 1.0):  # transformers 4 reads it here
        read.problems.append(f"partial_rotary_factor: got {part!r}; supported is one rotation of all of each head.")
    for key in _ROPE_KEYS:
        rope = read.config.get(key) or {}
        if not isinstance(rope, dict):
            read.problems.append(f"{key}: got {rope!r}; needed is an object with rope_type and rope_theta.")
            return 1
        for name, value in rope.items():
            if value is None:  # as if it were not there
                continue
            if name in ("rope_type", "type") and value != "default":
                read.problems.append(f"{key}.{name}: got {value!r}; supported is 'default'.")
            elif isinstance(value, dict) or value != _NEUTRAL.get(name, value):
                read.problems.append(f"{key}.{name}: got {value!r}; supported is one rotation of all of each head.")
        if "rope_theta" in rope:
            bases[f"{key}.rope_theta"] = rope["rope_theta"]
    found = {key: _base(read, key, value) for key, value in (bases or {"rope_theta": 10000.0}).items()}
    if len(set(found.values())) > 1:
        values = ", ".join(f"{key} {value}" for key, value in found.items())
        read.problems.append(f"rope_theta: got {values}; needed is one value: remove those that do not count.")
    return next(iter(found.values()))


def _base(read: _Reader, key: str, value: Any) -> int:
    inner = _Reader({key: value})
    base = inner.number(key, 10000.0)
    read.problems += inner.problems
    if base < 1 or base != int(base):
        read.problems.append(f"{key}: got {base}; supported are whole numbers above 0.")
    return int(base)
