"""A sample of `python -m tools.bench data`: both sides write the same bytes, and its numbers are those of its runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from megasdc.common.errors import ConfigError, MegasdcError
from tools.bench import statistics
from tools.bench.commands import app
from tools.bench.statistics import Cost
from tools.bench.training import data

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.mark.parametrize("kind", ["sentencepiece", pytest.param("huggingface", marks=pytest.mark.full)])
def test_both_sides_write_the_same_bytes(monkeypatch, kind):
    """The files agree; ratios, rates and verdict follow from the runs; without the pair that only fills caches."""
    told, calls = [], []
    alternate = statistics.run_alternating

    def all_but_first(*arguments):
        calls.append(arguments)
        return alternate(*arguments) if len(calls) > 1 else []

    monkeypatch.setattr(statistics, "run_alternating", all_but_first)
    options = data.DataBenchOptions(workers=2, blocks=1, characters=200_000, vocab=600)
    result = data.bench_data(options, [kind], on_progress=lambda *call: told.append(call))
    assert result.num_characters >= 200_000
    (one,) = result.comparisons
    assert one.tokenizer == kind
    assert one.difference is None
    ((ours, other),) = one.costs
    assert one.ratios["wall"].median == ours.wall_s / other.wall_s
    assert min(ours.cpu_s, other.cpu_s) > 0.05
    assert one.characters_per_s == (result.num_characters / ours.wall_s, result.num_characters / other.wall_s)
    assert result.num_characters / 8 < one.num_tokens < result.num_characters
    assert told[-1] == (kind, 1, 1)
    printed = Console(record=True, width=160)
    result.render(printed)
    assert printed.export_text().count("bytes of .bin and .idx: equal") == 1
    assert json.loads(json.dumps(result.as_dict()))["passed"] == result.passed


def fake_side(times, last_byte, ran):
    """Stand for both sides: write files, and say what was asked for."""

    def run(side, request):
        ran.append(side)
        out = data.Path(request["out"])
        out.mkdir()
        for name in ("train.bin", "train.idx"):
            (out / name).write_bytes(b"tokens" + last_byte[side])
        (out / "manifest.json").write_text('{"splits": {"train": {"num_tokens": 7}}}')
        return Cost(times[side], times[side])

    return run


@pytest.mark.parametrize(("ours", "byte", "code"), [(0.9, b"x", 0), (1.0, b"x", 0), (1.02, b"x", 1), (0.9, b"y", 1)])
def test_command_judges(monkeypatch, tmp_path, ours, byte, code):
    """Exit code 1 when the median misses the bar or bytes differ, else 0; the file holds every run that counts."""
    ran = []
    sides = {"ours": ours, "megatron": 1.0}, {"ours": byte, "megatron": b"x"}
    monkeypatch.setattr(data, "run_side", fake_side(*sides, ran))
    arguments = ["data", "--tokenizer", "sentencepiece", "--blocks", "3", "--characters", "100000"]
    out = tmp_path / "bench.json"
    found = CliRunner().invoke(app, [*arguments, "--vocab", "500", "--json", "--out", str(out)])
    assert found.exit_code == code, found.output
    assert sorted(ran) == ["megatron"] * 4 + ["ours"] * 4, "one pair before the three fills caches"
    content = json.loads(out.read_text())
    assert content == json.loads(found.stdout[found.stdout.index("{") :])
    (comparison,) = content["comparisons"]
    assert content["passed"] == (code == 0)
    assert comparison["difference"] == (None if byte == b"x" else "train.bin")
    assert np.allclose([pair[0]["wall_s"] for pair in comparison["costs"]], [ours] * 3)


def test_bad_options_and_failures(tmp_path):
    """Sizes outside their range are reported together; a side that fails is named with what it said."""
    with pytest.raises(ConfigError) as caught:
        data.DataBenchOptions(workers=-1, blocks=0, vocab=10)
    assert len(caught.value.problems) == 3
    request = {"text": str(tmp_path / "none.jsonl"), "out": str(tmp_path / "out"), "kind": "sentencepiece"}
    with pytest.raises(MegasdcError, match=r"the megatron side of the benchmark ended with 1:[\s\S]*tokenizer"):
        data.run_side("megatron", {**request, "tokenizer": str(tmp_path), "workers": 1})
