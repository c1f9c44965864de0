"""A sample of the measurement of the referee, and its verdict."""

from __future__ import annotations

from dataclasses import replace

import torch

from tools.bench.detection.options import RefereeOptions
from tools.bench.detection.referee import KINDS, MODES, TYPES, bench_referee


def test_a_sample_accuses_no_healthy_device() -> None:
    """Each kind of result in each type, computed in each way; some flips are seen."""
    result = bench_referee(RefereeOptions(elements=1, flips=2, width=64))
    assert result.passed and len(result.answers) == len(KINDS) * len(TYPES)
    for one in result.answers:
        assert one.compared % len(MODES["cpu"]) == 0 and one.nearest <= 1.0
        kind = torch.float32 if one.kind == "loss" else TYPES[one.type]
        assert len(one.seen) == torch.finfo(kind).bits and any(seen for seen, _ in one.seen)
    assert not replace(result, answers=[replace(result.answers[0], accused=1)]).passed
    assert len(list(result.report())) == 2
