"""Do the patterns that DeepSpeed reads say of every parameter how it is divided?"""

from __future__ import annotations

import re
from typing import Any

import pytest

from megasdc.config.model import ModelSection
from megasdc.model.sharding import Split, parameter_splits, universal_info
from tools.trainings.styles import LLAMA

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"num_layers": 12},
    "llama": {"num_layers": 12, **LLAMA},
    "gated_bias": {"num_layers": 3, **LLAMA, "bias": True},
    "qk_layernorm": {"num_layers": 3, **LLAMA, "qkv_bias": True, "megatron": {"qk_layernorm": True}},
}
LISTS = {
    "tp_replicated_parameter_patterns": Split.REPLICATED,
    "parameter_with_row_parallelism_patterns": Split.ROW,
    "parameter_with_2_sub_params_cat_dim_0": Split.GATED,
    "vocabulary_parameter_patterns": Split.VOCABULARY,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_on_the_list_of_its_division(name: str) -> None:
    """A name is matched by exactly one pattern, that of its division; column-divided ones by none; none is unused."""
    model = ModelSection(**MODELS[name])
    info, splits = universal_info(model, 512), parameter_splits(model)
    assert info["original_vocab_size"] == 512
    used = set()
    for parameter, split in splits.items():
        hits = [(kind, pattern) for key, kind in LISTS.items() for pattern in info[key] if re.match(pattern, parameter)]
        assert [kind for kind, _ in hits] == ([] if split is Split.COLUMN else [split]), parameter
        used |= {pattern for _, pattern in hits}
    assert used == {pattern for key in LISTS for pattern in info[key]}
    assert not any(re.match(pattern, parameter + "_2") for pattern in used for parameter in splits)


def test_a_tied_embedding_is_named_as_shared_by_stages() -> None:
    """DeepSpeed takes the first stage's copy of the tied embedding and no other parameter's."""
    tied, untied = (ModelSection(tie_embeddings=value) for value in (True, False))
    (pattern,) = universal_info(tied, 128)["pipeline_replicated_parameter_patterns"]
    found = [name for name in parameter_splits(tied) if re.match(pattern, name)]
    assert found == ["tied_modules.embedding.word_embeddings.weight"]
    assert universal_info(untied, 128)["pipeline_replicated_parameter_patterns"] == []
