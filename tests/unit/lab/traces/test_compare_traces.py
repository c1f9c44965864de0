"""Does the tool name the first divergence, in execution order, and answer with the documented exit codes?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, UPDATE, WEIGHT_GRAD, Address
from megasdc.lab.traces.trace_page import SHADES, shade
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, TraceWriter, trace_path

TOOL = Path(__file__).parents[4] / "tools" / "compare_traces.py"
LAYOUT = {"tensor": 2, "pipeline": 2, "data": 1}
HEADER: dict[str, Any] = {
    "layout": LAYOUT,
    "sequence_parallel": False,
    "micro_batch_size": 1,
    "accumulation_steps": 2,
    "precision": "fp32",
    "algorithm": "xxh3_64.v1",
    "granularity": "gemm",
    "phases": ["forward"],
    "interval": 1,
    "micro_batches": None,
    "layers": None,
    "device": "abacus",
    "threads": 1,
    "versions": {"torch": "2"},
    "seed": 1,
    "config_digest": "d",
}
Wrong = dict[tuple[int, Address], int]


def addresses(rank: int, steps: range) -> list[Address]:
    """What a rank of two stages would record; stage 0 forward first, backward last."""
    layer = str(2 + ParallelDims(**LAYOUT, rank=rank).pp_rank)
    found = []
    for step in steps:
        for micro_batch in (0, 1):
            for phase, slot in ((FORWARD, "output"), (RECOMPUTE, "output"), (BACKWARD, "input"), (WEIGHT_GRAD, "w")):
                parts = ("mlp.linear_fc1", "mlp.linear_fc2")
                for part in parts if phase in (FORWARD, RECOMPUTE) else parts[::-1]:
                    found.append(Address(step, micro_batch, phase, f"{layer}.layer.{part}", slot))
        for phase, slot in ((UPDATE, "weight.master"), (PARAMETER, "weight")):
            found.append(Address(step, None, phase, f"{layer}.layer.mlp.linear_fc1", slot))
    return found


def write_run(folder: Path, steps: range = range(1, 4), wrong: Wrong | None = None, **changes: Any) -> Path:
    """A run folder with a trace, in which some results are wrong."""
    for rank in range(4):
        writer = TraceWriter(trace_path(folder / "trace", rank, steps[0]), {**HEADER, "rank": rank, **changes})
        for step in steps:
            held = [one for one in addresses(rank, steps) if one.step == step]
            writer.append(Trace(held, [(wrong or {}).get((rank, one), 7) for one in held]))
        writer.close()
    return folder


def tool(*arguments: Any) -> tuple[int, Any, str]:
    """(exit code, JSON or null, standard error) of the real script."""
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if "--json" in arguments else done.stdout, done.stderr


def test_equal_runs(tmp_path: Path) -> None:
    """Exit code 0, from run folders and from trace folders; everything was compared."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    code, found, _ = tool(a, b / "trace", "--json")
    assert code == 0
    (one,) = found["comparisons"]
    assert one["same"] and one["first"] == [] and one["notes"] == []
    assert one["num_compared"] == sum(len(addresses(rank, range(1, 4))) for rank in range(4))


FC1, FC2 = "layer.mlp.linear_fc1", "layer.mlp.linear_fc2"
CASES = {
    # Stage 1 comes after stage 0 forward, before it backward.
    "forward": ((1, Address(2, 0, FORWARD, f"2.{FC2}", "output")), [(2, Address(2, 0, FORWARD, f"3.{FC1}", "output"))]),
    "backward": (
        (3, Address(2, 1, BACKWARD, f"3.{FC1}", "input")),
        [(0, Address(2, 1, BACKWARD, f"2.{FC2}", "input"))],
    ),
    "phase": ((2, Address(1, 1, FORWARD, f"3.{FC2}", "output")), [(0, Address(1, 1, RECOMPUTE, f"2.{FC1}", "output"))]),
    "direction": (
        (2, Address(1, 0, FORWARD, f"3.{FC1}", "output")),
        [(3, Address(1, 0, BACKWARD, f"3.{FC2}", "input"))],
    ),
    "micro_batch": (
        (2, Address(1, 0, WEIGHT_GRAD, f"3.{FC1}", "w")),
        [(0, Address(1, 1, FORWARD, f"2.{FC1}", "output"))],
    ),
    "step": (
        (3, Address(1, None, PARAMETER, f"3.{FC1}", "weight")),
        [(0, Address(2, 0, FORWARD, f"2.{FC1}", "output"))],
    ),
    "optimizer": (
        (3, Address(1, None, UPDATE, f"3.{FC1}", "weight.master")),
        [(0, Address(1, None, PARAMETER, f"2.{FC1}", "weight"))],
    ),
}


@pytest.mark.slow
def test_what_comes_after_replicas_are_summed_is_no_accusation(tmp_path: Path) -> None:
    """With several replicas a wrong update may be another rank's, and that is said; with one, and before, not."""
    early, late = CASES["backward"][0], CASES["optimizer"][0]
    replicas = {"layout": {"tensor": 2, "pipeline": 1, "data": 2}}
    for changes, wrong, said in ((replicas, late, True), (replicas, early, False), ({}, late, False)):
        runs = [tmp_path / f"{said}{len(changes)}{wrong[0]}{name}" for name in ("a", "b")]
        write_run(runs[0], **changes)
        write_run(runs[1], wrong={wrong: 8}, **changes)
        assert ("another rank may have caused it" in tool(*runs)[1]) is said


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_divergence_is_the_first_in_execution_order(tmp_path: Path, case: str) -> None:
    """What a wrong result causes on other ranks and later is listed after it, whatever the numbers of the ranks."""
    first, later = CASES[case]
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", wrong={first: 8, **{one: 9 for one in later}})
    code, found, _ = tool(a, b, "--json")
    assert code == 1
    (one,) = found["comparisons"]
    rank, address = first
    dims = ParallelDims(**LAYOUT, rank=rank)
    assert one["first"] == [
        {
            "rank": rank,
            "dp": dims.dp_rank,
            "pp": dims.pp_rank,
            "tp": dims.tp_rank,
            "step": address.step,
            "micro_batch": address.micro_batch,
            "phase": address.phase,
            "submodule": address.fqn,
            "slot": address.slot,
            "expected": f"{7:016x}",
            "got": f"{8:016x}",
            "expected_of_rank": rank,
        }
    ]
    assert one["num_divergences"] == 1 + len(later) == len(one["divergences"])
    text = tool(a, b)[1]
    assert f"first divergence: rank {rank} (dp 0, pp {dims.pp_rank}, tp {dims.tp_rank}), step {address.step}" in text
    assert f"{address.phase} of {address.fqn} ({address.slot})" in text


def test_two_ranks_wrong_at_the_same_place_are_both_first(tmp_path: Path) -> None:
    """The tool does not prefer one of them."""
    at = Address(1, 0, FORWARD, f"2.{FC1}", "output")
    b = write_run(tmp_path / "b", wrong={(0, at): 8, (1, at): 8})
    first = tool(write_run(tmp_path / "a"), b, "--json")[1]["comparisons"][0]["first"]
    assert [one["rank"] for one in first] == [0, 1]


def test_a_result_that_is_missing_is_a_divergence(tmp_path: Path) -> None:
    """A result that only one of the two has is not passed over."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    held = addresses(1, range(1, 4))
    gone = held.pop(1)
    writer = TraceWriter(trace_path(b / "trace", 1, 1), HEADER)
    writer.append(Trace(held, [7] * len(held)))
    writer.close()
    for pair, sides in (((a, b), ("expected", "got")), ((b, a), ("got", "expected"))):
        code, found, _ = tool(*pair, "--json")
        (one,) = found["comparisons"][0]["divergences"]
        assert code == 1
        assert (one["submodule"], one[sides[0]], one[sides[1]]) == (gone.fqn, f"{7:016x}", None)


@pytest.mark.slow
def test_steps_that_one_run_lacks_are_told(tmp_path: Path) -> None:
    """A shorter run is compared as far as it goes, and the output says how far; no common step is exit code 2."""
    a, b, c = (write_run(tmp_path / n, s) for n, s in (("a", range(1, 6)), ("b", range(3, 5)), ("c", range(6, 8))))
    code, found, _ = tool(a, b, "--json")
    (one,) = found["comparisons"]
    assert (code, one["steps"], one["steps_left_out"]) == (0, [3, 4], [1, 2, 5])
    assert "not both have them whole: steps 1-2, 5" in tool(a, b)[1]
    code, _, error = tool(a, c)
    assert code == 2
    assert "steps 1 to 5" in error and "6 to 7" in error


def test_a_step_that_one_rank_lacks_is_not_compared(tmp_path: Path) -> None:
    """Of a run that was killed, the step that only some ranks had written is left out, and told."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    writer = TraceWriter(trace_path(b / "trace", 3, 1), HEADER)
    held = [one for one in addresses(3, range(1, 4)) if one.step < 3]
    writer.append(Trace(held, [7] * len(held)))
    writer.close()
    code, found, _ = tool(a, b, "--json")
    (one,) = found["comparisons"]
    assert (code, one["steps"], one["steps_left_out"]) == (0, [1, 2], [3])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("precision", "bf16"),
        ("algorithm", "mixed_sum_64.v1"),
        ("granularity", "layer"),
        ("phases", ["backward"]),
        ("micro_batches", [0]),
        ("layers", [2]),
        ("accumulation_steps", 4),
        ("layout", {"tensor": 1, "pipeline": 2, "data": 2}),
    ],
)
def test_runs_that_cannot_be_compared(tmp_path: Path, key: str, value: Any) -> None:
    """Headers that do not fit give exit code 2 and name the field with both values; layouts get the option named."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **{key: value})
    code, _, error = tool(a, b)
    assert code == 2
    assert f"{key}: {HEADER[key]} and {value}" in error
    assert ("--cross-layout" in error) == (key in ("layout", "accumulation_steps"))


def test_differences_that_may_explain_are_noted(tmp_path: Path) -> None:
    """Another device, thread count, seed or configuration does not forbid the comparison, but is told."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", threads=4, device="loom", config_digest="e")
    code, found, _ = tool(a, b, "--json")
    assert code == 0
    assert [note.split(":")[0] for note in found["comparisons"][0]["notes"]] == ["device", "threads", "config_digest"]
    assert "note: threads: 1 in the first, 4 in the second" in tool(a, b)[1]


@pytest.mark.slow
def test_wrong_usage_and_missing_traces_are_exit_code_2(tmp_path: Path) -> None:
    """So is whatever keeps the tool from comparing, with a reason; the others are compared all the same."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", wrong={(0, addresses(0, range(1, 2))[0]): 1})
    (tmp_path / "empty").mkdir()
    assert tool(a)[0] == 2
    assert tool(a, b, "--no-such-option")[0] == 2
    assert tool(a, b, "--picture", tmp_path / "a.png")[0] == 2
    (tmp_path / "file").touch()
    code, text, error = tool(a, a, "--picture", tmp_path / "file" / "x.html")
    assert code == 2 and "x.html cannot be written" in error and text
    code, _, error = tool(a, tmp_path / "empty")
    assert code == 2 and "holds no trace" in error
    damaged = trace_path(write_run(tmp_path / "c") / "trace", 2, 1)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    code, found, error = tool(a, tmp_path / "c", b, "--json")
    assert code == 2 and "damaged" in error and str(damaged) in error
    assert [one["got"] for one in found["comparisons"]] == [str(b)]
    assert len(found["not_compared"]) == 1


def test_each_run_is_compared_with_the_first(tmp_path: Path) -> None:
    """Of several, those that differ are named; one that differs is enough for exit code 1."""
    wrong = {(0, addresses(0, range(1, 2))[0]): 1}
    a, b, c = write_run(tmp_path / "a"), write_run(tmp_path / "b", wrong=wrong), write_run(tmp_path / "c")
    code, found, _ = tool(a, b, c, "--json")
    assert code == 1
    assert [(one["expected"], one["got"], one["same"]) for one in found["comparisons"]] == [
        (str(a), str(b), False),
        (str(a), str(c), True),
    ]


def test_heat_maps(tmp_path: Path) -> None:
    """Shares by step and by rank are mismatches over results, in JSON, in the terminal and in the page."""
    wrong = {(2, Address(2, m, FORWARD, f"3.{FC1}", "output")): 1 for m in (0, 1)}
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", wrong=wrong)
    page = tmp_path / "p.html"
    code, found, _ = tool(a, b, "--json", "--limit", 1)
    assert code == 1
    (one,) = found["comparisons"]
    # A step of one rank holds 10 results of FC1: 4 phases x 2 micro-batches, master weights, weights.
    assert one["by_step"] == {f"3.{FC1}": {"1": 0.0, "2": 2 / 20, "3": 0.0}}
    assert one["by_rank"] == {f"3.{FC1}": {"0": 0.0, "1": 0.0, "2": 2 / 30, "3": 0.0}}
    assert (one["num_divergences"], len(one["divergences"])) == (2, 1)
    code, text, _ = tool(a, b, "--limit", 1, "--picture", page)
    assert code == 1
    assert f"3.{FC1} | {SHADES[1]} |" in text and f"3.{FC1} |  {SHADES[1]} |" in text
    assert "... and 1 more (--limit)" in text
    content = page.read_text(encoding="utf-8")
    assert f"3.{FC1}" in content
    assert 'src="http' not in content.split("<body>")[1].replace("'", '"')[:100] and len(content) > 3_000_000


@pytest.mark.parametrize(("share", "mark"), [(0.0, 0), (0.001, 1), (0.34, 2), (0.7, 3), (0.999, 3), (1.0, 4)])
def test_shades(share: float, mark: int) -> None:
    """Blank means none and the darkest means all: neither is used for nearly none or nearly all."""
    assert shade(share) == SHADES[mark]


def test_the_tool_needs_no_torch() -> None:
    """Looking at files does not take the seconds that torch takes."""
    code = "import megasdc.lab.traces.trace_page, sys; assert not {'torch', 'deepspeed', 'plotly'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
