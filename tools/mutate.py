"""Change one place of the program at a time, and see whether a test fails: what survives is a hole in the tests.

    python -m tools.mutate --mutations 60 --seed 1 [--files 'megasdc/sdc/*.py'] [--log mutations.jsonl]

Places are drawn by a seed from the syntax trees of the files: comparisons turned or made to hold at the border, ``and``
and ``or``, ``+`` and ``-``, conditions that hold always or never, numbers one more, ``not`` left out, results that are
not returned. Each is tried in a copy of the repository, by the tests that import the changed module, those that say its
name first, for at most ``--limit`` seconds. Exit code 1 if one survives, of which each needs a test, or a reason why no
test can tell. What is in the log is not tried again.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
        survived: none failed.
        by: the first test that failed; what ended the attempt else; empty where it survived.
        tests: files of tests that were run.
        seconds: that they took.
    """

    mutation: Mutation
    survived: bool
    by: str
    tests: int
    seconds: float


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


def tests_of(root: Path, file: str) -> list[str]:
    """Files of tests that import a module, those that have its name first; where none does, those of its folder."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, own = module.rpartition(".")
    found = []
    for test in sorted((root / "tests").rglob("test_*.py")):
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


def attempt(copy: Path, mutation: Mutation, limit_s: float) -> Outcome:
    """Change the place in a copy of the repository, run the tests, and put it back."""
    path, began = copy / mutation.file, time.monotonic()
    right = path.read_text(encoding="utf-8")
    tests = tests_of(copy, mutation.file)
    if not tests:
        return Outcome(mutation, True, "", 0, 0.0)
    path.write_text(mutated(right, mutation.place), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full", *tests]
    try:
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = failed[0][:200] if failed else f"pytest ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        by = f"not told within {limit_s:.0f} s"
    finally:
        path.write_text(right, encoding="utf-8")
    return Outcome(mutation, not by, by, len(tests), round(time.monotonic() - began, 1))


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
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests for each; default 300")
    parser.add_argument("--log", type=Path, default=None, help="file that keeps what was tried")
    given = parser.parse_args(argv)
    known = {one.mutation: one for one in read_log(given.log)}
    chosen = drawn(ROOT, given.files, given.mutations, given.seed)
    with tempfile.TemporaryDirectory(prefix="megasdc_mutate_") as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs")
        shutil.copytree(ROOT, copy, ignore=left_out)
        for number, mutation in enumerate(chosen, 1):
            if mutation not in known:
                known[mutation] = attempt(copy, mutation, given.limit)
                if given.log is not None:
                    with open(given.log, "a", encoding="utf-8") as log:
                        log.write(json.dumps(asdict(known[mutation])) + "\n")
            one = known[mutation]
            told = "SURVIVED" if one.survived else "killed"
            print(
                f"{number}/{len(chosen)} {told} {mutation.file}:{mutation.line} {mutation.what[:120]} [{one.by[:100]}]",
                flush=True,
            )
    survived = [known[mutation] for mutation in chosen if known[mutation].survived]
    print(f"{len(survived)} of {len(chosen)} survived")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
