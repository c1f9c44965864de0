"""Are counts of ranks, parameters and intervals put together as what they are?"""

from __future__ import annotations

import pytest

from megasdc.config.hooks import HookSpec
from megasdc.optim.bounds import COLUMNS, bound_rows, merge_totals, metrics_of, warnings_of


def _row(**values: float) -> list[float]:
    return [values.get(name, 0.0) for name in COLUMNS]


def test_counts_add_and_ratios_do_not() -> None:
    """Two intervals: elements and bounded ones add up, the largest ratio is the larger."""
    one = {"before_norm": {"2.fc.weight": _row(elements=10, by_spike=1, largest_ratio=5, mass=4, removed=1)}}
    other = {"before_norm": {"2.fc.weight": _row(elements=10, by_absolute=3, largest_ratio=2, mass=4)}}
    other["before_norm"]["2.fc.bias"] = _row(elements=20, nan=1, inf=2)
    (row,) = bound_rows(merge_totals(one, other))["before_norm"]
    assert row["submodule"] == "2.fc"
    assert row["share"] == pytest.approx(4 / 40)
    assert row["removed_share"] == pytest.approx(1 / 8)
    assert (row["largest_ratio"], row["nan"], row["inf"]) == (5, 1, 2)
    spike = HookSpec.model_validate({"hook": "spike_aware", "theta": 9.0, "parameters": ["*.weight"]})
    found = metrics_of(merge_totals(one, other), [spike])
    assert found["bounds/non_finite"] == 3
    assert found["bounds/share"] == pytest.approx(4 / 20), "of the parameters that an entry bounds"
    assert one["before_norm"]["2.fc.weight"] == _row(elements=10, by_spike=1, largest_ratio=5, mass=4, removed=1)


def test_submodules_come_in_the_order_of_the_model() -> None:
    """Layer 10 comes after layer 2."""
    rows = {f"{layer}.fc.weight": _row(elements=1) for layer in (10, 2, 0)}
    assert [row["submodule"] for row in bound_rows({"local": rows})["local"]] == ["0.fc", "2.fc", "10.fc"]
    names = ("model.layers.10.mlp", "lm_head", "model.layers.2.mlp", "conv1")
    rows = {f"{name}.weight": _row(elements=1) for name in names}
    found = [row["submodule"] for row in bound_rows({"local": rows})["local"]]
    assert found == ["conv1", "lm_head", "model.layers.2.mlp", "model.layers.10.mlp"]


def test_a_warning_is_of_the_entry_that_bounds() -> None:
    """Only the first entry that fits a parameter counts, and only what its own kind has bounded."""
    specs = [
        HookSpec.model_validate({"hook": "absolute", "theta": 1.0, "parameters": ["2.*"], "warn_share": 0.1}),
        HookSpec.model_validate({"hook": "absolute", "theta": 2.0, "warn_share": 0.3}),
        HookSpec.model_validate({"hook": "spike_aware", "theta": 9.0, "warn_share": 0.5}),
    ]
    rows = {f"{layer}.fc.weight": _row(elements=10, by_absolute=2, by_spike=4) for layer in (2, 3)}
    told = [fields for _, fields in warnings_of({"before_norm": rows}, specs)]
    assert [(one["entry"], one["submodule"], one["share"]) for one in told] == [(0, "2.fc", 0.2)]
