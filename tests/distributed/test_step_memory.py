"""The predicted peak of a step is what the allocator's own events add up to, on each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_distributed

from megasdc.config.checks import check_layout
from megasdc.config.model import ffn_width
from megasdc.model.sizes import layers_per_stage, model_sizes
from megasdc.train.memory import _Stage, predict_step_memory
from tools.trainings.step_memory import BF16, CASES, FOUR, FUSED, MemoryCase, measure_peak
from tools.trainings.styles import LLAMA

pytestmark = pytest.mark.distributed

SHORT = {
    "two stages": MemoryCase(2, deepspeed=FOUR, parallel={"pipeline": 2}),
    "two replicas in bf16": MemoryCase(2, LLAMA, BF16),
}
"""In every test run; those of the bench are the campaign."""


def _peak(case: MemoryCase) -> tuple[int, float]:
    return measure_peak(case.config(), case.vocab)


def _compare(case: MemoryCase) -> None:
    config = case.config()
    predicted = [one.total for one in predict_step_memory(config, check_layout(config, case.ranks), case.vocab)]
    for stage, peak in run_distributed(_peak, case.ranks, case, timeout_s=300.0):
        assert predicted[stage] == pytest.approx(peak, rel=0.1), (stage, predicted)


@pytest.mark.parametrize("name", SHORT)
def test_each_stages_peak_is_predicted_within_a_tenth(name: str) -> None:
    """What check-config prints is within 10 % of the measured peak on every rank."""
    _compare(SHORT[name])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_peaks_of_all_configurations(name: str) -> None:
    """The same over precisions, layouts, recomputation, vocabularies and fused modules."""
    _compare(CASES[name])


LAYERS = {
    "GPT": MemoryCase(1),
    "Llama": MemoryCase(1, {**LLAMA, "num_query_groups": 2}),
    "Llama in bf16": MemoryCase(1, LLAMA, BF16),
    "fused GPT": MemoryCase(1, FUSED),
    "fused Llama in bf16": MemoryCase(1, {**LLAMA, **FUSED}, BF16),
}


def _kept_by_layers(cases: list[MemoryCase]) -> list[float]:
    """Bytes that autograd keeps of one transformer layer of each case, parameters and rotations not counted."""
    from megasdc.model.gpt import TransformerBlock
    from megasdc.model.pipeline import build_pipeline
    from megasdc.parallel import groups
    from megasdc.train.build_engine import DTYPES

    dims = groups.init_model_parallel(1, 1, 60)
    found = []
    for case in cases:
        config = case.config()
        sections, dtype = config.megasdc, DTYPES[config.precision]
        pipeline, _ = build_pipeline(
            sections.model, sections.parallel, dims, vocab_size=case.vocab, seed=1, dtype=dtype
        )
        block = next(module for module in pipeline.modules() if isinstance(module, TransformerBlock)).to(dtype)
        kept: dict[int, Any] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, Any] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor

        hidden = torch.randn(case.sequence, 2, sections.model.hidden_size, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = block(hidden * 1)
        rotation = () if block.context.learned_positions else block.context.rotation(hidden)
        for tensor in (*block.parameters(), *rotation):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        found.append(float(sum(storage.nbytes() for storage in kept.values())))
        del output
    return found


def test_a_layer_keeps_what_is_predicted() -> None:
    """Counted by saved_tensors_hooks on the real modules, unfused and fused: the bytes of the activation term."""
    (counted,) = run_distributed(_kept_by_layers, 1, list(LAYERS.values()))
    for (name, case), kept in zip(LAYERS.items(), counted, strict=True):
        config = case.config()
        model = config.megasdc.model
        sizes = model_sizes(model, ffn_width(model), case.vocab)
        counts = layers_per_stage(config.megasdc.parallel, sizes)
        stage = _Stage(config, check_layout(config, 1), sizes, case.vocab, case.vocab, 0, counts, on_gpu=False)
        assert stage.layer_kept() == pytest.approx(kept, rel=0.001), name
