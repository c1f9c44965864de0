"""Is a drill read as it is written, and is what it should do computed right?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError
from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import Injector
from megasdc.ops.stress.drill import SlotDrill, chance, read_drill, summarize_drills


def test_profile_and_host() -> None:
    """One host needs no name; of several one must be named, and be there."""
    assert read_drill("node_10", ["a"]).host == "a"
    found = read_drill("node_10@b", ["a", "b"])
    assert (found.profile, found.host, len(found.faults)) == ("node_10", "b", 4)
    for text, problem in [
        ("node_10", "give node_10@HOST with one of a, b"),
        ("node_10@c", "there is no host 'c'"),
        ("node_99@a", "there is no node profile 'node_99'"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            read_drill(text, ["a", "b"])


def test_what_cannot_be_drilled_is_refused(tmp_path: Path) -> None:
    """Files and tokens are not there; ranks are those of one device."""
    file = tmp_path / "own.json"
    for fault, problem in [({"phase": "checkpoint"}, "saves nothing"), ({"rank": 1}, "faults.0.rank: got 1")]:
        profile = {"description": "x", "source": "x", "published": {}, "assumed": [], "faults": [fault]}
        file.write_text(json.dumps(profile))
        with pytest.raises(ConfigError, match=problem):
            read_drill(str(file), ["a"])


def test_the_chance_is_that_of_the_draws() -> None:
    """Against 20,000 draws of NumPy: the share of tensors with at least one harmed element."""
    random = np.random.default_rng(0)
    for probability, element, elements in [(1.0, 1e-3, 500), (0.3, 1e-2, 100), (0.05, None, 10)]:
        spec = FaultSpec(probability=probability, element_probability=element)
        harmed = random.random(20_000) < probability
        if element is not None:
            harmed &= random.binomial(elements, element, 20_000) > 0
        assert chance(spec, elements) == pytest.approx(harmed.mean(), abs=4 * 0.5 / 20_000**0.5)
    assert chance(FaultSpec(probability=0.5), 1) == 0.5


def test_expected_and_real_harm_agree() -> None:
    """The real injector harms as many results as were expected, within five standard deviations, and says so."""
    fault = {"element_probability": 1e-3, "bits": "mantissa", "submodule": "*.linear_proj"}
    drill = SlotDrill([fault])
    harm = drill.injector_of(64)
    assert harm is not None
    result = torch.randn(20, 50)
    for step in range(1, 401):
        harm(Address(step, 0, "forward", "h64.self_attention.linear_proj", "output"), result)
        harm(Address(step, 0, "forward", "h64.mlp.linear_fc1", "output"), result)
    sent = [json.loads(json.dumps(one.summary())) for one in (drill, SlotDrill([fault]))]
    assert sent[0]["tallies"][0]["reasons"]  # times that no element was chosen
    (said,) = summarize_drills([fault], sent)
    rate = 1 - (1 - 1e-3) ** 1000
    assert said["expected"] == pytest.approx(400 * rate)
    assert abs(said["changed"] - 400 * rate) < 5 * (400 * rate * (1 - rate)) ** 0.5
    assert said["unfired"] is None
    assert isinstance(harm, Injector) and not harm.firings, "a long test would keep them all"


def test_why_nothing_was_harmed() -> None:
    """Wide models, later steps and results that never come are told, each with its reason.

    A process that met no result at all, as one that only takes part in groups, does not hide them.
    """
    faults = [{"min_hidden_size": 1000}, {"steps": [450, None]}, {"phase": "optimizer_state"}]
    drill = SlotDrill(faults)
    harm = drill.injector_of(64)
    assert harm is not None
    harm(Address(1, 0, "forward", "x", "output"), torch.ones(4))
    said = summarize_drills(faults, [SlotDrill(faults).summary(), drill.summary()])
    assert all(not one["expected"] and not one["changed"] for one in said)
    assert "narrower than min_hidden_size 1000" in said[0]["unfired"]
    assert all("no result of phase" in one["unfired"] for one in said[1:])
