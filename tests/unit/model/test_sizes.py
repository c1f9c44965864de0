"""Do the formulas count what the modules hold, and do layers divide as asked?"""

from __future__ import annotations

import itertools

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.model import PRESETS, ModelSection, ffn_width
from megasdc.config.sections import ParallelSection
from megasdc.model.sizes import layers_per_stage, model_sizes


def _sizes(num_layers: int, vocab: int = 512):
    section = ModelSection(num_layers=num_layers, hidden_size=64, num_attention_heads=4)
    return model_sizes(section, ffn_width(section), vocab)


def _load(sizes, counts):
    """Parameters of the largest stage, the first with the embedding and the last with norm and output."""
    loads = [count * sizes.layer for count in counts]
    loads[0] += sizes.embedding + sizes.positions
    loads[-1] += sizes.final_norm + (sizes.output or sizes.logits)
    return max(loads)


def test_uniform_division():
    """Equal counts; what does not divide is refused with the remedy."""
    assert layers_per_stage(ParallelSection(pipeline=4), _sizes(8)) == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match=r"7 layers do not divide by 2 stages"):
        layers_per_stage(ParallelSection(pipeline=2), _sizes(7))


def test_given_counts():
    """Counts are used as given; wrong sums are refused."""
    assert layers_per_stage(ParallelSection(pipeline=2, partition=[3, 5]), _sizes(8)) == [3, 5]
    with pytest.raises(ConfigError, match="add up to 8"):
        layers_per_stage(ParallelSection(pipeline=2, partition=[3, 4]), _sizes(8))


@pytest.mark.parametrize("layers", range(2, 9))
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("vocab", [128, 4096])
def test_division_by_parameters_is_the_best(layers: int, stages: int, vocab: int):
    """No other division has a smaller largest stage (all are tried)."""
    if layers < stages:
        pytest.skip("fewer layers than stages")
    sizes = _sizes(layers, vocab)
    counts = layers_per_stage(ParallelSection(pipeline=stages, partition="parameters"), sizes)
    cuts = itertools.combinations(range(1, layers), stages - 1)
    ways = [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts]
    assert sum(counts) == layers and min(counts) >= 1
    assert _load(sizes, counts) == min(_load(sizes, way) for way in ways)


def test_flops_follow_the_published_formula():
    """For a GPT with 4h MLP and full heads: 72 L s h^2 (1 + s/12h + V/12Lh) a sample, with half of the score matrix."""
    section = ModelSection(num_layers=24, hidden_size=1024, num_attention_heads=16)
    s, h, layers, vocab = 2048, 1024, 24, 50304
    sizes = model_sizes(section, ffn_width(section), vocab)
    published = 72 * layers * s * h * h * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert sizes.flops_per_token(s) * s == pytest.approx(published, rel=1e-12)


def test_presets_span_the_range():
    """There are sizes from about 1 M to 70 B parameters."""
    totals = []
    for preset in PRESETS.values():
        section = ModelSection(**preset)
        totals.append(model_sizes(section, ffn_width(section), 32000 if len(totals) > 7 else 512).total)
    assert min(totals) < 2e6
    assert max(totals) > 65e9
