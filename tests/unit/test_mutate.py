"""Mutations: every place is found, one alone is changed, and a hole in tests is told from a change that they see."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import mutate
from tools.mutate import Mutation, Outcome, attempt, drawn, mutated, mutations_of

SOURCE = '''
def grade(points, most=10):
    """Points of most."""
    if points > most and not points == 99:
        return most
    return points + 1 - len("a" + "b")
'''
RIGHT = "from megasdc.small import grade\n\ndef test_small() -> None:\n    assert grade(3) == 2\n"


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    (tmp_path / "megasdc").mkdir()
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "megasdc" / "__init__.py").touch()
    (tmp_path / "megasdc" / "small.py").write_text(SOURCE)
    (tmp_path / "tests" / "unit" / "test_small.py").write_text(RIGHT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: x\n")
    return tmp_path


def test_one_place_is_changed_at_a_time(root: Path) -> None:
    """And text is left alone."""
    found = mutations_of(root, root / "megasdc" / "small.py")
    texts = [one.what for one in found]
    for wanted in ("points > most -> points >= most", "not points == 99 -> points == 99", "10 -> 11"):
        assert wanted in texts
    assert any(one.endswith("-> False") for one in texts) and any(one.endswith("return None") for one in texts)
    assert not any(
        "'a'" in one.partition(" -> ")[0] and "-" in one.partition(" -> ")[2] for one in texts if "len" not in one
    )
    right = ast.unparse(ast.parse(SOURCE))
    changed = [mutated(SOURCE, one.place).strip() for one in found]
    assert right not in changed and len(set(changed)) == len(changed)
    with pytest.raises(IndexError, match="no 99"):
        mutated(SOURCE, 99)


def test_they_are_drawn_by_a_seed(root: Path) -> None:
    """The same again, others with another seed, none twice."""
    one, again, other = (drawn(root, ["megasdc/*.py"], 6, seed) for seed in (1, 1, 2))
    assert one == again != other and len(set(one)) == 6
    assert len(drawn(root, ["megasdc/*.py"], 99, 1)) == len(mutations_of(root, root / "megasdc" / "small.py"))
    assert mutate.tests_of(root, "megasdc/small.py") == ["tests/unit/test_small.py"]
    of_ranks = root / "tests" / "distributed" / "test_small_ranks.py"
    of_ranks.parent.mkdir()
    of_ranks.write_text(RIGHT)
    assert mutate.tests_of(root, "megasdc/small.py", "unit") == ["tests/unit/test_small.py"]
    assert len(mutate.tests_of(root, "megasdc/small.py")) == 2


def test_only_holes_are_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is in the log is not; a reason that was written into it is enough, and it is an error until then."""
    log, tried = tmp_path / "log.jsonl", list[str]()

    def survives(copy: Path, mutation: Mutation, limit_s: float, tier: str) -> Outcome:
        tried.append(mutation.what)
        return Outcome(mutation, "killed" if len(tried) == 1 else "survived", "", 1, 0.0)

    monkeypatch.setattr(mutate, "attempt", survives)
    monkeypatch.setattr(mutate, "ROOT", root)
    call = ["--mutations", "2", "--files", "megasdc/small.py", "--log", str(log)]
    assert mutate.main(call) == mutate.main(call) == 1
    assert len(tried) == 3 and len(set(tried)) == 2
    log.write_text(log.read_text().replace('"reason": ""', '"reason": "a limit"'))
    assert mutate.main(call) == 0 and len(tried) == 3


def test_what_survived_a_campaign_has_a_reason() -> None:
    """Or a test, with which it was tried again."""
    found = {one.mutation: one for one in mutate.read_log(mutate.ROOT / "tests" / "mutations.jsonl")}
    assert found and [one for one in found.values() if one.is_hole] == []
    assert all(one.commit for one in found.values())


@pytest.mark.slow
def test_a_hole_is_told_from_what_tests_see(root: Path) -> None:
    """The file is as it was afterwards."""
    found = {one.what: one for one in mutations_of(root, root / "megasdc" / "small.py")}
    hole: Mutation = found["points > most -> points >= most"]
    seen = next(one for what, one in found.items() if what.endswith("return None") and "points" in what)
    assert attempt(root, hole, 60.0).end == "survived"
    told = attempt(root, seen, 60.0)
    assert told.end == "killed" and "test_small" in told.by
    assert (root / "megasdc" / "small.py").read_text() == SOURCE


@pytest.mark.slow
def test_what_tests_cannot_tell_is_undecided(root: Path) -> None:
    """A test that fails without the change, and one that does not end in time: neither says that it was seen."""
    test = root / "tests" / "unit" / "test_small.py"
    hole = next(one for one in mutations_of(root, root / "megasdc" / "small.py") if one.what == "10 -> 11")
    for wrong in ("assert False", "import time; time.sleep(60)"):
        test.write_text(f"from megasdc.small import grade\n\ndef test_small() -> None:\n    {wrong}\n")
        assert attempt(root, hole, 3.0).end == "undecided"
