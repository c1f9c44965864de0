"""Does the benchmark of checksums measure what it says, and fail when it should?"""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from megasdc.common.errors import ConfigError
from tools.bench.detection.checksum import BAR, bench_checksum
from tools.bench.detection.options import ChecksumBenchOptions
from tools.bench.statistics import SLACK, estimate_median


@pytest.fixture(scope="module")
def result():
    return bench_checksum(ChecksumBenchOptions(blocks=2, sizes_mib=(1, 2), trials=100))


def rendered(result):
    out = io.StringIO()
    result.render(Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.slow
def test_every_type_and_size_is_compared(result):
    """There is one comparison a type and size, each over the wanted number of pairs, with positive rates."""
    every = [one for one in result.comparisons if one.device == "cpu"]
    host, looks = every[:8], every[8:]
    assert [(one.dtype, one.bar, one.size_mib) for one in looks] == [*[("fp32", 1.3, 1)] * 2, *[("bf16", 1.3, 1)] * 2]
    assert len({one.algorithm for one in looks}) == 2 and "a look for NaN and Inf" in rendered(result)
    sizes = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
    assert [(one.dtype, one.size_mib) for one in host] == [one for one in sizes for _ in range(2)]
    for one in host:
        assert (one.algorithm, one.bar) == ("xxh3_64.v1", BAR if one.against.endswith("from memory") else None)
        assert set(one.ratios) == {"wall", "cpu"} and len(one.costs) == 2 and min(one.bytes_per_s) > 0
    assert len({one.against for one in host}) == 2


def test_the_result_is_json_and_text(result):
    """Every number survives JSON; the text has threads, rates and the blind spots of each algorithm."""
    assert json.loads(json.dumps(result.as_dict()))["options"]["trials"] == 100
    text = rendered(result)
    assert "XXH3 in 1 thread, tensor.sum() in 1" in text and "GB/s" in text
    assert "torch.hash_tensor (for comparison)" in text and "swap of 2 elements" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_was_not_run_is_said(result):
    """Without a GPU the output names what is missing."""
    assert "no CUDA device" in result.not_run[0] and "NOT RUN: speed of the kernel" in rendered(result)


def test_verdicts_follow_the_bars(result):
    """A slow checksum, a missed fault, and a comparison that misses none each fail the result; no bar fails nothing."""

    def with_time(ratio, bar):
        one = dataclasses.replace(result.comparisons[0], ratios={"wall": estimate_median([ratio] * 8)}, bar=bar)
        return dataclasses.replace(result, comparisons=[one])

    assert with_time(BAR, BAR).passed and not with_time(BAR + 2 * SLACK, BAR).passed
    assert "FAIL" in rendered(with_time(2.0, BAR)) and with_time(2.0, None).passed
    good = with_time(1.0, BAR)
    for algorithm, misses in (("xxh3_64.v1", 1), ("torch.hash_tensor", 0)):
        trials = [
            dataclasses.replace(one, misses=misses)
            if (one.algorithm, one.fault) == (algorithm, "swap of 2 elements")
            else one
            for one in good.trials
        ]
        bad = dataclasses.replace(good, trials=trials)
        assert good.passed and not bad.passed and "FAIL" in rendered(bad)


@pytest.mark.slow
def test_threads_are_given_back(result):
    """The process has as many threads after a measurement as before."""
    before = torch.get_num_threads()
    bench_checksum(ChecksumBenchOptions(blocks=1, sizes_mib=(1,), trials=100, threads=before + 1))
    assert torch.get_num_threads() == before


def test_bad_options_are_refused_together():
    """All problems are in one message, each with its option, value and least value."""
    with pytest.raises(ConfigError, match=r"(?s)--blocks: 0 .* 1.*--sizes: 0 .*--trials: 5 must be at least 100"):
        ChecksumBenchOptions(blocks=0, sizes_mib=(4, 0), trials=5)
