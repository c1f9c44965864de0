"""Change one place of the program at a time, and see whether a test fails: what survives is a hole in the tests.

    python -m tools.mutate --mutations 60 --seed 1 [--files 'megasdc/sdc/*.py'] [--tests unit] [--log mutations.jsonl]

Places are drawn by a seed from the syntax trees of the files: comparisons turned or made to hold at the border, ``and``
and ``or``, ``+`` and ``-``, conditions that hold always or never, numbers one more, ``not`` left out, results that are
not returned. Each is tried in a copy of the repository, by the tests that import the changed module, those that say its
name first, for at most ``--limit`` seconds. It is killed where a test fails that passes without it, and undecided where
time ran out or a test fails either way. Exit code 1 if one survives without a reason in its line of the log why no test
can tell. What is in the log is not tried again, but for what survived without a reason. The log of campaigns so far is
``tests/mutations.jsonl``; with the seed and on the commit of one, the same command goes on with it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
FIRST = 40
"""Files of tests that are run of a module that many tests import."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
"""Without those that paths and lists have, whose change every test would see."""
NEVER = ("__name__ == '__main__'", "TYPE_CHECKING")
"""Conditions that no test can see changed."""


@dataclass(frozen=True)
class Mutation:
    """One change.

    Args:
        file: from the repository's root.
        line: of the place, the first is 1.
        place: number of the place among those of the file, in the order of the tree.
        what: the change, as the source has it.
    """

    file: str
    line: int
    place: int
    what: str


@dataclass(frozen=True)
class Outcome:
    """What tests said of one.

    Args:
        end: whether a test saw it.
        by: the first test that failed, or what ended the attempt; empty where it survived.
        tests: files of tests that were run.
        seconds: that they took.
        commit: that it was tried on.
        reason: why no test can tell; written by hand into the log.
    """

    mutation: Mutation
    end: Literal["killed", "survived", "undecided"]
    by: str
    tests: int
    seconds: float
    commit: str = ""
    reason: str = ""

    @property
    def is_hole(self) -> bool:
        """Whether a test is missing."""
        return self.end == "survived" and not self.reason


class _Changer(ast.NodeTransformer):
    """Counts the places of a tree; changes one of them.

    Args:
        wanted: number of the place to change; -1: none.
    """

    def __init__(self, wanted: int = -1) -> None:
        self._wanted = wanted
        self.found: list[tuple[int, str]] = []

    def _at(self, node: ast.AST, changed: ast.AST) -> ast.AST:
        """The changed node if this is the place that is wanted, else the node."""
        if ast.unparse(node).startswith(NEVER):
            return node
        ast.copy_location(changed, node)
        ast.fix_missing_locations(changed)
        self.found.append((getattr(node, "lineno", 0), f"{ast.unparse(node)} -> {ast.unparse(changed)}"))
        return changed if len(self.found) - 1 == self._wanted else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        turned = COMPARISONS[type(node.ops[0])]()
        return self._at(node, ast.Compare(node.left, [turned, *node.ops[1:]], node.comparators))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._at(node, ast.BoolOp(other, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._at(node, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.op))
        is_text = any(
            isinstance(one, ast.Constant | ast.JoinedStr) and not _is_number(one) for one in (node.left, node.right)
        )
        return node if other is None or is_text else self._at(node, ast.BinOp(node.left, other(), node.right))

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        never = self._at(node.test, ast.Constant(False))
        return (
            node if never is node.test else ast.copy_location(ast.If(ast.Constant(False), node.body, node.orelse), node)
        )

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return self._at(node, ast.Constant(value + 1)) if is_number else node  # type: ignore[operator]

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return node
        return self._at(node, ast.Return(ast.Constant(None)))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node  # annotations change nothing

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def mutations_of(root: Path, file: Path) -> list[Mutation]:
    """All places of a file."""
    counter = _Changer()
    counter.visit(ast.parse(file.read_text(encoding="utf-8")))
    name = str(file.relative_to(root))
    return [Mutation(name, line, place, what) for place, (line, what) in enumerate(counter.found)]


def mutated(source: str, place: int) -> str:
    """A file's source with one place changed; comments are lost.

    Raises:
        IndexError: it has no such place.
    """
    changer = _Changer(place)
    tree = changer.visit(ast.parse(source))
    if place >= len(changer.found):
        raise IndexError(f"there are {len(changer.found)} places, no {place}")
    return ast.unparse(tree) + "\n"


def tests_of(root: Path, file: str, tier: str = "") -> list[str]:
    """Files of tests that import a module, those that have its name first; where none does, those of its folder.

    Args:
        tier: folder of ``tests`` that they are in; empty: any.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, own = module.rpartition(".")
    found = []
    for test in sorted((root / "tests" / tier).rglob("test_*.py")):
        text = test.read_text(encoding="utf-8")
        if f"from {module} import" in text or f"import {module}" in text or _imports_from(text, parent, own):
            found.append(str(test.relative_to(root)))
    found.sort(key=lambda one: (own not in Path(one).name, "tests/unit" not in one))
    rooms = Path(file).parts[1:-1]
    while not found and rooms:
        found = sorted(str(one.relative_to(root)) for one in (root / "tests/unit").joinpath(*rooms).rglob("test_*.py"))
        rooms = rooms[:-1]
    return found[:FIRST]


def _imports_from(text: str, parent: str, own: str) -> bool:
    return any(
        line.startswith(f"from {parent} import") and own in line.replace(",", " ").split() for line in text.splitlines()
    )


def attempt(copy: Path, mutation: Mutation, limit_s: float, tier: str = "") -> Outcome:
    """Change the place in a copy of the repository, run the tests, and put it back.

    Args:
        tier: of the tests, as for ``tests_of``.
    """
    path, began = copy / mutation.file, time.monotonic()
    right = path.read_text(encoding="utf-8")
    tests = tests_of(copy, mutation.file, tier)
    if not tests:
        return Outcome(mutation, "survived", "", 0, 0.0)
    path.write_text(mutated(right, mutation.place), encoding="utf-8")
    try:
        by = _first_failure(copy, tests, limit_s)
    finally:
        path.write_text(right, encoding="utf-8")
    test = by.partition(" - ")[0]
    is_test = test.partition("::")[0] in tests
    # What did not end in time may have been slow by chance: without the change it has to be twice as fast.
    either_way = by and _first_failure(copy, [test] if is_test else tests, limit_s if is_test else limit_s / 2)
    end: Literal["killed", "survived", "undecided"] = "undecided" if either_way else "killed" if by else "survived"
    return Outcome(mutation, end, by[:200], len(tests), round(time.monotonic() - began, 1))


def _first_failure(copy: Path, tests: Sequence[str], limit_s: float) -> str:
    """The test that failed and how, or how else they ended; empty where all passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as running:
        try:
            told, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return f"not told within {limit_s:.0f} s"
    failed = [line.partition(" ")[2] for line in told.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"pytest ended with {running.returncode}" if running.returncode else ""


def drawn(root: Path, patterns: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Places by a seed; each file has the same chance, so that long ones are not all that is looked at."""
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.suffix == ".py"})
    chance, found = random.Random(seed), list[Mutation]()
    places = {file: some for file in files if (some := mutations_of(root, file))}
    while len(found) < count and places:
        file = chance.choice(sorted(places))
        found.append(places[file].pop(chance.randrange(len(places[file]))))
        if not places[file]:
            del places[file]
    return found


def read_log(path: Path | None) -> Iterator[Outcome]:
    """What was tried before."""
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            yield Outcome(**{**raw, "mutation": Mutation(**raw["mutation"])})


def main(argv: Sequence[str]) -> int:
    """Try mutations; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=60, help="how many; default 60")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="+", default=["megasdc/**/*.py"], help="patterns from the repository's root")
    parser.add_argument("--tests", default="", help="folder of tests that are run, as unit; default all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests for each; default 300")
    parser.add_argument("--log", type=Path, default=None, help="file that keeps what was tried")
    given = parser.parse_args(argv)
    known = {one.mutation: one for one in read_log(given.log)}
    chosen = drawn(ROOT, given.files, given.mutations, given.seed)
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(command, capture_output=True, text=True, check=False)  # a copy has no commit
    with tempfile.TemporaryDirectory(prefix="megasdc_mutate_") as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs")
        shutil.copytree(ROOT, copy, ignore=left_out)
        for number, mutation in enumerate(chosen, 1):
            if mutation not in known or known[mutation].is_hole:
                outcome = replace(attempt(copy, mutation, given.limit, given.tests), commit=revision.stdout.strip())
                known[mutation] = outcome
                if given.log is not None:
                    with open(given.log, "a", encoding="utf-8") as log:
                        log.write(json.dumps(asdict(outcome)) + "\n")
            one = known[mutation]
            place = f"{mutation.file}:{mutation.line} {mutation.what[:120]}"
            print(f"{number}/{len(chosen)} {one.end} {place} [{(one.reason or one.by)[:100]}]", flush=True)
    ends = Counter(known[mutation].end for mutation in chosen)
    holes = sum(known[mutation].is_hole for mutation in chosen)
    print(f"{', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}; {holes} without a reason")
    return int(holes > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
