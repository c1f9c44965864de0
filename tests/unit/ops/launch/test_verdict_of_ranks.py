"""Is the rank named that computed something else, and not those that received it?"""

from __future__ import annotations

from typing import Any

import pytest

from megasdc.common.addresses import MICRO_BATCH_PHASES, PHASES, Address
from megasdc.config.sections import TraceSection
from megasdc.ops.golden.result import judge_reports
from megasdc.ops.golden.watched_ranks import RankReport
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import (
    AFFECTED,
    DIVERGENT,
    HEALTHY,
    NOT_COMPARABLE,
    GoldenComparison,
    compare_run,
    judge_cell,
    trace_gaps,
)
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import INCONCLUSIVE

LAYOUT = ParallelDims(2, 2, 1)
REPLICAS = ParallelDims(1, 1, 2)


def _header(layout: ParallelDims = LAYOUT, **trace: Any) -> dict[str, Any]:
    sections = {
        "data": {"path": "x"},
        "protect": "off",
        "training": {"steps": 1},
        "logging": {"run_dir": "r"},
        "trace": trace,
    }
    return {"layout": layout.layout, "config": {"train_micro_batch_size_per_gpu": 1, "megasdc": sections}}


def _trace(stage: int, changed: set[int]) -> Trace:
    """A rank's two micro-batches under 1F1B, as recorded: forward, forward, backward, backward."""
    order = [(0, "forward"), (1, "forward"), (0, "backward"), (1, "backward")]
    addresses = [Address(1, mb, phase, f"{stage}.x", slot) for mb, phase in order for slot in ("a", "b")]
    return Trace(addresses, [place + 100 * (place in changed) for place in range(len(addresses))])


def _findings(changes: dict[int, set[int]]) -> dict[int, list]:
    found = {}
    for rank in range(4):
        dims = ParallelDims(2, 2, 1, rank)
        clean = _trace(dims.pp_rank, set())
        found[rank] = [compare_run(clean, _trace(dims.pp_rank, changes.get(rank, set())), dims).finding]
    return found


def _status(changes: dict[int, set[int]]) -> dict[int, str]:
    return {rank: verdict.status for rank, verdict in judge_cell(_findings(changes), LAYOUT).items()}


def test_nothing_differs() -> None:
    """All healthy."""
    assert set(_status({}).values()) == {HEALTHY}


def test_the_tensor_rank_that_is_first() -> None:
    """Rank 1 is wrong in a forward pass, its peer one result later, the next stage after both."""
    found = _status({1: {0, 1, 4}, 0: {1, 4}, 2: {0, 1}, 3: {0, 1}})
    assert found == {1: DIVERGENT, 0: AFFECTED, 2: AFFECTED, 3: AFFECTED}


def test_backward_comes_down_the_stages() -> None:
    """A wrong gradient on the last stage comes before what the first stage gets of it."""
    assert _status({3: {5}, 0: {4, 5}, 1: {4, 5}}) == {3: DIVERGENT, 0: AFFECTED, 1: AFFECTED, 2: HEALTHY}


def test_micro_batches_come_in_their_order() -> None:
    """Forward of micro-batch 1 was recorded before backward of 0, which does not depend on it: 0 comes first."""
    found = judge_cell(_findings({0: {2, 4}}), LAYOUT)
    assert str(found[0].first) == "step 1, micro-batch 0, backward of 0.x (a)"


def test_two_ranks_at_one_place_are_both_named() -> None:
    """Where two are wrong at the same place, neither got it from the other."""
    assert _status({0: {0}, 1: {0, 1}}) == {0: DIVERGENT, 1: DIVERGENT, 2: HEALTHY, 3: HEALTHY}


def test_k_of_n_runs() -> None:
    """Runs in which a rank was first are counted; in others it may be healthy."""
    wrong, right = _findings({1: {3}}), _findings({})
    verdicts = judge_cell({rank: right[rank] + wrong[rank] + right[rank] for rank in range(4)}, LAYOUT)
    assert (verdicts[1].runs, verdicts[1].wrong_runs, verdicts[1].status) == (3, 1, DIVERGENT)


def _every_phase(rank: int, layout: ParallelDims, changed: dict[str, int]) -> GoldenComparison:
    """Two micro-batches and a step, with the first results from a phase on changed in the micro-batch given."""
    dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
    addresses = [
        Address(1, number, phase, "x", slot) for number in (0, 1) for phase in MICRO_BATCH_PHASES for slot in ("a", "b")
    ] + [Address(1, None, phase, "x", "a") for phase in PHASES if phase not in MICRO_BATCH_PHASES]
    values = [int((a.micro_batch or 0) >= changed.get(a.phase, 9)) for a in addresses]
    return compare_run(Trace(addresses, [0] * len(addresses)), Trace(addresses, values), dims).finding


def _judged(layout: ParallelDims, *changes: dict[str, int], **options: Any) -> list[str]:
    findings = {rank: [_every_phase(rank, layout, changed)] for rank, changed in enumerate(changes)}
    return [verdict.status for verdict in judge_cell(findings, layout, **options).values()]


LATER = {"reduced_grad": 0, "update": 0, "parameter": 0}
OWN = {"accumulated_grad": 0, **LATER}


def test_an_accumulated_gradient_names_its_rank() -> None:
    """It is seen before replicas are summed: not the owner of the shard is accused, but who gave the wrong part."""
    assert _judged(REPLICAS, LATER, OWN) == [AFFECTED, DIVERGENT]


def test_a_sum_over_replicas_accuses_nobody() -> None:
    """A shard that is wrong though both parts were right: either rank or the link, also if one shows nothing of it."""
    assert _judged(REPLICAS, LATER, {"parameter": 0}) == [INCONCLUSIVE] * 2
    assert _judged(REPLICAS, {"reduced_grad": 0}, {}) == [INCONCLUSIVE] * 2
    four = ParallelDims(2, 1, 2)
    assert _judged(four, {}, LATER, {}, {"parameter": 0}) == [HEALTHY, INCONCLUSIVE, HEALTHY, INCONCLUSIVE]
    assert _judged(ParallelDims(2, 1, 1), {}, LATER) == [HEALTHY, DIVERGENT]


def test_a_sum_over_tied_stages_accuses_nobody() -> None:
    """Stages that hold the sum of each other's gradients are both wrong, whichever gave the wrong part."""
    assert _judged(ParallelDims(1, 2, 1), OWN, OWN) == [INCONCLUSIVE] * 2
    assert _judged(ParallelDims(1, 2, 2), {}, OWN, LATER, OWN) == [HEALTHY, INCONCLUSIVE, AFFECTED, INCONCLUSIVE]


def test_a_norm_that_all_share_accuses_nobody() -> None:
    """Updates that are wrong on several ranks may be one wrong norm; one that is wrong alone is its rank's."""
    late = {"update": 0, "parameter": 0}
    assert _judged(REPLICAS, late, late) == [INCONCLUSIVE] * 2
    assert _judged(REPLICAS, late, {"parameter": 0}) == [DIVERGENT, AFFECTED]


def test_parameters_after_the_all_gather() -> None:
    """A copy that differs alone is its holder's; where several do, any of the group may have sent it."""
    copy = {"parameter": 0}
    assert _judged(REPLICAS, {}, copy) == [HEALTHY, DIVERGENT]
    assert _judged(ParallelDims(1, 1, 3), {}, copy, copy) == [INCONCLUSIVE] * 3


def test_replicas_that_are_wrong_by_themselves() -> None:
    """Before the sum no replica gets a value of another: each that differs there computed something else."""
    first = {"forward": 0, "backward": 0, "weight_grad": 0, **OWN}
    second = {"backward": 1, "weight_grad": 1, **OWN}
    assert _judged(REPLICAS, first, second) == [DIVERGENT, DIVERGENT]
    assert _judged(REPLICAS, first, OWN) == [DIVERGENT, DIVERGENT]
    assert _judged(REPLICAS, first, LATER) == [DIVERGENT, AFFECTED]


def test_missing_evidence_accuses_nobody() -> None:
    """A rank whose run was not reported, or of which nothing is recorded, may have been the first."""
    layout = ParallelDims(2, 1, 1)
    wrong, right = _every_phase(0, layout, {"backward": 0}), _every_phase(1, layout, {})
    for other in ([right], [right, GoldenComparison(0, 0)]):
        found = judge_cell({0: [right, wrong], 1: other}, layout)
        assert (found[0].status, found[0].wrong_runs, found[1].status) == (INCONCLUSIVE, 1, HEALTHY)
        assert "rank 1 of the cell reported no result" in found[0].detail
    found = judge_cell({0: [wrong, wrong], 1: [right]}, layout)
    assert (found[0].status, found[0].wrong_runs) == (DIVERGENT, 1)


def test_nothing_compared_is_not_healthy() -> None:
    """A rank of which the golden trace holds nothing is not comparable, and the exit code says so."""
    found = judge_cell({0: [_every_phase(0, REPLICAS, {})], 1: [GoldenComparison(0, 0)]}, REPLICAS)
    assert [found[rank].status for rank in (0, 1)] == [HEALTHY, NOT_COMPARABLE]
    assert (found[0].compared, found[1].compared) == (20, 0)
    nothing = {**_run(), "compared": 0}
    result = judge_reports([_report(rank, runs=[_run() if rank else nothing]) for rank in range(4)], _header())
    assert result.exit_code == 80 and [rank["compared"] for rank in result.as_dict()["ranks"]] == [0, 8, 8, 8]


@pytest.mark.parametrize(
    ("trace", "gap"),
    [
        ({"phases": [phase for phase in PHASES if phase != "accumulated_grad"]}, "phases without accumulated_grad"),
        ({"granularity": "layer"}, "granularity layer"),
        ({"layers": [2]}, "layers [2]"),
        ({"micro_batches": [0]}, "micro_batches [0]"),
        ({"interval": 2}, "interval 2"),
    ],
)
def test_a_trace_with_gaps_accuses_nobody_of_several(trace: dict[str, Any], gap: str) -> None:
    """What was not recorded may have come first on another rank; a rank alone has received nothing."""
    gaps = trace_gaps(TraceSection.model_validate(trace), False)
    assert gaps == (gap,)
    assert _judged(ParallelDims(2, 1, 1), {"backward": 0}, {"backward": 1}, gaps=gaps) == [INCONCLUSIVE] * 2
    assert _judged(ParallelDims(1, 1, 1), {"backward": 0}, gaps=gaps) == [DIVERGENT]
    without = TraceSection.model_validate({"phases": [phase for phase in PHASES if phase != "recompute"]})
    assert trace_gaps(without, False) == () and trace_gaps(without, True) == ("phases without recompute",)
    wrong = {
        **_run(),
        "divergences": 1,
        "first": Address(1, 0, "backward", "x", "a").__dict__,
        "key": [1, 0, 0, 1, 0, 3],
    }
    result = judge_reports([_report(rank, runs=[wrong]) for rank in range(4)], _header(**trace))
    assert {verdict.status for verdict in result.verdicts} == {INCONCLUSIVE} and result.exit_code == 73


def _report(rank: int, **fields: object) -> RankReport:
    return RankReport("h", rank, 0, rank, **{"ended": "done", "runs": [], **fields})  # type: ignore[arg-type]


def _run() -> dict:
    return {"compared": 8, "divergences": 0, "first": None, "key": []}


def test_other_ends() -> None:
    """A rank that died, hung or is not comparable is told apart from those that waited for it."""
    ranks = [
        _report(0, ended="hung", position=9),
        _report(1, ended="hung", position=5),
        _report(2, ended="hung", position=9),
    ]
    result = judge_reports([*ranks, _report(3, ended="stopped")], _header())
    assert [verdict.status for verdict in result.verdicts] == ["stopped", "hung", "stopped", "stopped"]
    assert result.exit_code == 75
    dead = [_report(0, ended="failed", code=79), _report(1, ended="died", code=-9), _report(2, ended="absent")]
    result = judge_reports([*dead, _report(3, runs=[_run()])], _header())
    assert [verdict.status for verdict in result.verdicts] == ["stopped", "died", "no answer", "healthy"]
    assert result.exit_code == 79
    assert "may itself wait for others" in judge_reports([*ranks, _report(3)], _header()).verdicts[1].detail
    differs = _report(0, differences={"threads": [1, 2]})
    result = judge_reports([differs, *(_report(rank) for rank in range(1, 4))], _header())
    assert {verdict.status for verdict in result.verdicts} == {"not comparable"}
    assert "threads: golden 1, here 2" in result.verdicts[0].detail and result.exit_code == 80
    assert judge_reports([_report(rank, runs=[_run()]) for rank in range(4)], _header()).exit_code == 0


def test_a_hang_beside_a_divergence_accuses_nobody_of_hanging() -> None:
    """Where results were wrong, the ranks that stand still wait; the one with the fewest results is not told apart."""
    wrong = {**_run(), "divergences": 1, "first": vars(Address(1, 0, "backward", "x", "a")), "key": [1, 0, 0, 1, 0, 3]}
    ranks = [
        _report(rank, ended="hung", position=9 - rank, runs=[wrong if rank == 1 else _run()], detail="no progress")
        for rank in range(4)
    ]
    result = judge_reports(ranks, _header())
    assert [verdict.status for verdict in result.verdicts] == ["stopped", "divergent", "stopped", "stopped"]
    assert "waits for other ranks" in result.verdicts[3].detail and result.exit_code == 73
    ranks[2].detail = "frozen, no sign of life for 9 s"
    assert judge_reports(ranks, _header()).verdicts[2].status == "hung"


def test_a_wrong_rank_whose_peer_lost_its_node() -> None:
    """Of a tensor pair one differs and was stopped, the other's node fell silent: corruption, and nobody is named."""
    wrong = {**_run(), "divergences": 1, "first": vars(Address(1, 0, "backward", "x", "a")), "key": [1, 0, 0, 1, 0, 3]}
    pair = [_report(0, ended="stopped", runs=[wrong], detail="its cell ended"), _report(1, ended="absent")]
    result = judge_reports(pair, _header(ParallelDims(2, 1, 1)))
    assert [verdict.status for verdict in result.verdicts] == [INCONCLUSIVE, "no answer"] and result.exit_code == 73
    assert "rank 1 of the cell reported no result" in result.verdicts[0].detail
    assert "its cell ended" in result.verdicts[0].detail
