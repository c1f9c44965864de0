"""Is the rank named that computed something else, and not those that received it?"""

from __future__ import annotations

from megasdc.addresses import Address
from megasdc.golden.cells import RankReport
from megasdc.golden.result import judge_reports
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import AFFECTED, DIVERGENT, HEALTHY, find, judge

HEADER = {"layout": {"tensor": 2, "pipeline": 2, "data": 1}}


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
        found[rank] = [find(clean, _trace(dims.pp_rank, changes.get(rank, set())), dims)]
    return found


def _status(changes: dict[int, set[int]]) -> dict[int, str]:
    return {rank: verdict.status for rank, verdict in judge(_findings(changes)).items()}


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
    found = judge(_findings({0: {2, 4}}))
    assert str(found[0].first) == "step 1, micro-batch 0, backward of 0.x (a)"


def test_two_ranks_at_one_place_are_both_named() -> None:
    """Where two are wrong at the same place, neither got it from the other."""
    assert _status({0: {0}, 1: {0, 1}}) == {0: DIVERGENT, 1: DIVERGENT, 2: HEALTHY, 3: HEALTHY}


def test_k_of_n_runs() -> None:
    """Runs in which a rank was first are counted; in others it may be healthy."""
    wrong, right = _findings({1: {3}}), _findings({})
    verdicts = judge({rank: right[rank] + wrong[rank] + right[rank] for rank in range(4)})
    assert (verdicts[1].runs, verdicts[1].wrong_runs, verdicts[1].status) == (3, 1, DIVERGENT)


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
    result = judge_reports([*ranks, _report(3, ended="stopped")], HEADER)
    assert [verdict.status for verdict in result.verdicts] == ["stopped", "hung", "stopped", "stopped"]
    assert result.exit_code == 75
    dead = [_report(0, ended="failed", code=79), _report(1, ended="died", code=-9), _report(2, ended="absent")]
    result = judge_reports([*dead, _report(3, runs=[_run()])], HEADER)
    assert [verdict.status for verdict in result.verdicts] == ["stopped", "died", "no answer", "healthy"]
    assert result.exit_code == 79
    differs = _report(0, differences={"threads": [1, 2]})
    result = judge_reports([differs, *(_report(rank) for rank in range(1, 4))], HEADER)
    assert {verdict.status for verdict in result.verdicts} == {"not comparable"}
    assert "threads: golden 1, here 2" in result.verdicts[0].detail and result.exit_code == 80
    assert judge_reports([_report(rank, runs=[_run()]) for rank in range(4)], HEADER).exit_code == 0
