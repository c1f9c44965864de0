"""Does the benchmark of comparing checkpoints measure what it says, and fail when it should?"""

from __future__ import annotations

import io
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megasdc.common.errors import ConfigError
from tools.bench.checkpoints.compare import BAR, MEMORY_SLACK_MIB, bench_compare, write_checkpoint
from tools.bench.checkpoints.options import CompareBenchOptions
from tools.bench.statistics import estimate_median


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare_bench")


@pytest.fixture(scope="module")
def result(folder):
    """Of processes that fork from one that has imported what they need, which else is most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.bench.checkpoints.compare"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.bench.checkpoints.compare.multiprocessing", SimpleNamespace(get_context=lambda _: context))
        return bench_compare(CompareBenchOptions(blocks=2, size_mib=192, jobs=2, folder=folder))


def rendered(result):
    out = io.StringIO()
    result.render(Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.slow
def test_both_programs_are_measured(result, folder):
    """The first, cat, has the bar, cmp none; no difference is found in equal files, and none of them is left behind."""
    assert [(one.against, one.bar) for one in result.comparisons] == [("cat", BAR), ("cmp", None)]
    for one in result.comparisons:
        assert set(one.ratios) == {"wall"} and len(one.costs) == 2 and min(one.bytes_per_s) > 0
        assert one.difference is None
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_memory_is_bounded(result):
    """Four times the size takes no more memory, with equal files and with files that differ everywhere."""
    assert [(one.content, one.size_mib) for one in result.memory] == [("equal", (48, 192)), ("different", (48, 192))]
    assert all(one.passed for one in result.memory), [one.growth_mib for one in result.memory]
    assert all(0 <= size < 128 for one in result.memory for size in one.growth_mib)


@pytest.mark.slow
def test_a_missed_bar_fails(result):
    """A slow comparison, a difference in equal files, and memory that grows with the size are each a failure."""
    cat, cmp = (replace(one, ratios={"wall": estimate_median([BAR] * 9)}) for one in result.comparisons)
    good = replace(result, comparisons=[cat, cmp])
    assert good.passed and "FAIL" not in rendered(good)
    slow = replace(cat, ratios={"wall": estimate_median([BAR + 0.1] * 9)})
    wrong = replace(cmp, difference="1 findings in equal files")
    grown = replace(result.memory[0], growth_mib=(2.0, 2.0 + MEMORY_SLACK_MIB + 1))
    for bad in (
        replace(good, comparisons=[slow, cmp]),
        replace(good, comparisons=[cat, wrong]),
        replace(good, memory=[grown, result.memory[1]]),
    ):
        assert not bad.passed and "FAIL" in rendered(bad)
        assert json.loads(json.dumps(bad.as_dict()))["passed"] is False


@pytest.mark.slow
def test_every_element_of_the_other_file_differs(folder):
    """The files of the measurement of memory differ in one bit of each element, and in nothing else."""
    one, other = (torch.load(write_checkpoint(folder / f"{f}.pt", 16, flipped=f == "b")) for f in ("a", "b"))
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert bool(((tensor.view(torch.int32) ^ other[name].view(torch.int32)) == 1 << 20).all())


def test_options_are_checked():
    """Too small a file, no block, and a folder that is not there are told at once."""
    with pytest.raises(ConfigError) as error:
        CompareBenchOptions(blocks=0, size_mib=1, folder=Path("/nowhere"))
    assert all(name in str(error.value) for name in ("--blocks", "--size", "--folder"))
    with pytest.raises(ConfigError, match="MiB free"):
        CompareBenchOptions(size_mib=1 << 40)
