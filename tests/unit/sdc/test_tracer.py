"""Are the choices of a trace section what the recording side knows?"""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megasdc.common.addresses import PHASES, Address
from megasdc.config.sections import TraceSection
from megasdc.model.kinds import BLOCK_PARTS, KINDS, submodule_kind
from megasdc.model.submodules import Submodule
from megasdc.sdc.tracer import GRANULARITIES, Tracer, choose_submodules
from megasdc.tensors.checksum import ALGORITHMS, algorithm, checksum


def _choices(field: str) -> set[str]:
    annotation = TraceSection.model_fields[field].annotation
    literals = [part for part in (annotation, *get_args(annotation)) if get_args(part)]
    return {value for part in literals for value in get_args(part) if isinstance(value, str)}


def test_the_section_offers_what_there_is() -> None:
    """Algorithms and granularities of the configuration, which knows no torch, are those that can be used."""
    assert _choices("algorithm") == set(ALGORITHMS)
    assert _choices("granularity") == set(GRANULARITIES)
    assert tuple(TraceSection().phases) == PHASES


def test_granularities_contain_each_other() -> None:
    """A finer granularity observes everything that a coarser one does, the finest every kind."""
    layer, submodule, gemm = (GRANULARITIES[name] for name in ("layer", "submodule", "gemm"))
    assert layer < submodule < gemm == set(KINDS)


def _submodule(fqn: str) -> Submodule:
    return Submodule(fqn, submodule_kind(fqn), None, {})


def test_names_have_kinds() -> None:
    """The kind of every part of the catalogue is known by its name; other names are refused."""
    found = [submodule_kind(name) for name in ("0.word_embeddings", "1.positions", "9.norm", "12.output", "loss")]
    assert found == ["embedding", "positions", "final_norm", "head", "loss"]
    assert {submodule_kind(f"7.layer.{name}") for name in BLOCK_PARTS} == set(BLOCK_PARTS.values())
    for name in ("7.layer", "layer.mlp_bda.x", "7.unheard_of", ""):
        with pytest.raises(ValueError, match="name of no submodule"):
            submodule_kind(name)


def test_layers_and_granularity_choose() -> None:
    """Only submodules of the layers named, of the kinds of the granularity, and always the loss."""
    everything = [_submodule(f) for f in ("0.word_embeddings", "2.layer.mlp_bda", "2.layer.mlp.linear_fc1")]
    everything += [_submodule(f) for f in ("3.layer.mlp_bda", "loss")]
    chosen = choose_submodules(everything, "layer", [2])
    assert [submodule.fqn for submodule in chosen] == ["2.layer.mlp_bda", "loss"]
    assert choose_submodules(everything, "gemm", None) == everything


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_tracer_records_what_it_was_asked_for(name: str) -> None:
    """Of results of other submodules, steps, micro-batches and phases nothing is kept; ``pop_trace`` empties it."""
    section = TraceSection(interval=2, micro_batches=[0], phases=["forward", "update"])
    tracer = Tracer(algorithm(name), section, ["loss"])
    value = torch.arange(5.0)
    wanted = [Address(1, 0, "forward", "loss", "output"), Address(3, None, "update", "loss", "weight")]
    others = [
        Address(2, 0, "forward", "loss", "output"),
        Address(1, 1, "forward", "loss", "output"),
        Address(1, 0, "backward", "loss", "input"),
        Address(1, 0, "forward", "2.layer.mlp_bda", "output"),
    ]
    for address in (wanted[0], *others, wanted[1]):
        assert tracer(address, value) is None
    trace = tracer.pop_trace()
    assert trace.addresses == wanted
    assert trace.checksums == [checksum(value, name)] * 2
    assert not tracer.pop_trace()
