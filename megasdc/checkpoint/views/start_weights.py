"""Weights from which a new run starts, and whether they fit its model and its data.

The source is a folder of initial weights, a checkpoint of any layout, or a folder of checkpoints. Weights alone are
taken, in the type in which they were saved: of a bf16 run not the optimizer's fp32 copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import CHECKPOINT, CHECKPOINTS, kind_of
from megasdc.checkpoint.initial import InitialWeights, check_vocabulary
from megasdc.checkpoint.views.logical import CheckpointWeights, open_weights
from megasdc.common.errors import ConfigError, StorageError
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.data.manifest import Manifest as DataManifest

FIELD = "megasdc.model.initial_weights"


def open_start(path: Path | str) -> InitialWeights | CheckpointWeights:
    """Open the weights that ``model.initial_weights`` names.

    Files of initial weights are verified as they are read; a checkpoint is verified as a whole before it is used.

    Raises:
        CheckpointError: the folder is of another kind or damaged, or no checkpoint in it is whole.
        StorageError: the folder cannot be read.
    """
    try:
        kind = kind_of(path)
    except OSError as error:
        raise StorageError(f"{FIELD}: {path} cannot be read ({error.strerror}); name another folder") from error
    if kind in (CHECKPOINT, CHECKPOINTS):
        weights: CheckpointWeights = open_weights(path)
        return weights
    return InitialWeights(path)


def check_fits(weights: InitialWeights | CheckpointWeights, model: ModelSection) -> None:
    """Compare a run's model with the model of the weights.

    Raises:
        ConfigError: fields differ; each is listed with both values.
    """
    have, want = _identity(weights.model), _identity(model)
    problems = [
        f"megasdc.model.{field}: got {want[field]!r}; the weights in {weights.path} need {have[field]!r}."
        for field in have
        if field in want and have[field] != want[field]
    ]
    if problems:
        raise ConfigError([*problems, f"The section to use is in {weights.model_file}."], FIELD)


def check_tokenizer(weights: InitialWeights | CheckpointWeights, data: DataManifest, where: str) -> None:
    """Compare the tokenizer of prepared data, in the folder ``where``, with that of the weights.

    Raises:
        ConfigError: the number of entries or the tokenizer differs.
    """
    if isinstance(weights, InitialWeights):
        check_vocabulary(weights, data, where)
        return
    own, found = (weights.vocab_size, weights.tokenizer_checksum), (data.tokenizer.vocab_size, data.tokenizer.checksum)
    if own[0] == found[0] and own[1] in (None, found[1]):
        return
    assert weights.config is not None, "a checkpoint holds its run's configuration"
    tokenizer = Path(weights.config["megasdc"]["data"]["path"]) / "tokenizer"
    raise ConfigError(
        f"{FIELD}: the weights in {weights.path} were trained with a tokenizer of {own[0]} entries and checksum "
        f"{own[1]}, that of {where} has {found[0]} and {found[1]}; prepare the data with data.tokenizer.path of its "
        f"tokenizer, which is in {tokenizer}"
    )


def _identity(model: ModelSection) -> dict[str, Any]:
    """The fields that define the meaning of the weights, with derived defaults filled in."""
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "kv_channels": head_width(model),
        "ffn_hidden_size": ffn_width(model),
        "position_embedding": model.position_embedding,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "activation": model.activation,
        "gated_mlp": model.gated_mlp,
        "bias": model.bias,
        "qkv_bias": model.bias or model.qkv_bias,
        "tie_embeddings": model.tie_embeddings,
    }
    if model.position_embedding == "learned":
        found["max_positions"] = model.max_positions
    else:
        found["rotary_base"] = model.rotary_base
    ignored = {"deterministic_mode"}
    found["megatron"] = {key: value for key, value in model.megatron.items() if key not in ignored}
    return found
