"""A sample of the measurement of the referee, and its verdict."""

from __future__ import annotations

from dataclasses import replace

from tools.bench.detection.options import RefereeOptions
from tools.bench.detection.referee import KINDS, MODES, TYPES, bench_referee


def test_a_sample_accuses_no_healthy_device() -> None:
    """Each kind of result in each type, computed in each way; flips of the highest bits of the exponent are seen."""
    result = bench_referee(RefereeOptions(elements=1, flips=2, width=64))
    assert result.passed and len(result.answers) == len(KINDS) * len(TYPES)
    for one in result.answers:
        assert one.compared % len(MODES) == 0 and one.nearest <= 1.0
        assert one.seen[-3][0] == one.seen[-3][1] > 0 or "relu" in one.kind, "ReLU gives zeros"
    assert not replace(result, answers=[replace(result.answers[0], accused=1)]).passed
    assert len(list(result.report())) == 2
