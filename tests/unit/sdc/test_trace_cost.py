"""Is the cost model's arithmetic what it says? Its bytes are checked against runs in the distributed tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megasdc.config.model import ModelSection
from megasdc.sdc.cost import RankWork, Reads, predicted_share, reads_of_step, total

MODEL = ModelSection(num_layers=2, hidden_size=1024, num_attention_heads=16)
WORK = RankWork(MODEL, vocab=8192, sequence=512, micro_batch=1, accumulation=4)


def test_share_is_time_over_time() -> None:
    """Bytes over their rate plus calls times their cost, over FLOPs over theirs, divided by the interval."""
    reads = total(reads_of_step(WORK, "gemm"))
    expected = (reads.bytes / 1e9 + reads.count * 1e-6) / (WORK.flops / 1e11)
    got = predicted_share(WORK, "gemm", bytes_per_s=1e9, flop_per_s=1e11, call_s=1e-6)
    assert got == pytest.approx(expected)
    amortised = predicted_share(WORK, "gemm", bytes_per_s=1e9, flop_per_s=1e11, call_s=1e-6, interval=50)
    assert amortised == pytest.approx(expected / 50)


def test_finer_granularities_read_more() -> None:
    """Each granularity reads at least what a coarser one does, in every phase."""
    layer, submodule, gemm = (reads_of_step(WORK, name) for name in ("layer", "submodule", "gemm"))
    for phase in layer:
        assert layer[phase].bytes <= submodule[phase].bytes <= gemm[phase].bytes
    assert total(layer).bytes < total(submodule).bytes < total(gemm).bytes


def test_wider_models_pay_less() -> None:
    """Arithmetic grows with the square of the width, what is read for a token with the width."""
    shares = []
    for h in (1024, 4096, 12288):
        work = RankWork(ModelSection(num_layers=2, hidden_size=h, num_attention_heads=h // 64), 8192, 512, 1, 64)
        shares.append(predicted_share(work, "gemm", bytes_per_s=1e9, flop_per_s=1e11, call_s=0))
    assert shares[0] > shares[1] > shares[2]


def test_replicas_share_the_update() -> None:
    """With two replicas a rank owns half of what the optimizer updates, and the rest stays."""
    one, two = reads_of_step(WORK, "gemm"), reads_of_step(replace(WORK, data=2), "gemm")
    assert two["update"].bytes == one["update"].bytes / 2
    assert {phase for phase in one if one[phase].bytes != two[phase].bytes} == {"update", "reduced_grad"}
    assert one["accumulated_grad"] == two["accumulated_grad"]
    assert Reads(1, 2) + Reads(3, 4) * 2 == Reads(7, 10)
