"""Writes a small task from the running Python's standard library: what kind of thing a name is.

python tools/identifier_task.py prepared/identifiers

``OUT/train.jsonl`` holds documents to train on (``OrderedDict is a class``), ``OUT/questions.jsonl`` questions for
`megasdc eval --choices`. No name is in both, each kind has equally many in both, and a name that is of two kinds
anywhere in the library is in neither. The same Python gives the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = ("class", "constant", "function", "method")
HELD_OUT = 250
"""Questions of each kind."""
SHORTEST = 3
"""Characters of a name; shorter ones say nothing."""
_OTHERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


def names_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and kind of each definition in a module: its own functions and constants, classes and methods anywhere."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, "function"
        targets = node.targets if isinstance(node, ast.Assign) else []
        yield from ((one.id, "constant") for one in targets if isinstance(one, ast.Name) and one.id.isupper())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from ((one.name, "method") for one in methods)


def names_of_library(root: Path) -> dict[str, list[str]]:
    """Names of one kind alone, by kind; each list in an order that only the names decide."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for path in sorted(root.rglob("*.py")):
        if _OTHERS & set(path.relative_to(root).parts):
            continue
        for name, kind in names_in(ast.parse(path.read_bytes())):
            kinds[name].add(kind)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(kinds, key=_shuffled):
        special = name.startswith("__") or len(name) < SHORTEST
        if len(kinds[name]) == 1 and not special:
            found[kinds[name].pop()].append(name)
    return found


def write_task(out: Path, root: Path, held_out: int = HELD_OUT) -> dict[str, int]:
    """Writes both files, and returns the number of lines of each.

    Raises:
        SystemExit: the library has too few names of a kind.
    """
    names = names_of_library(root)
    count = min(len(found) for found in names.values())
    if count <= held_out:
        raise SystemExit(f"{root}: {count} names of the rarest kind, more than --held-out {held_out} are needed")
    chosen = {kind: found[:count] for kind, found in names.items()}
    documents = [f"{name} is a {kind}" for kind in KINDS for name in chosen[kind][held_out:]]
    questions = [(name, kind) for kind in KINDS for name in chosen[kind][:held_out]]
    choices = [f" {kind}" for kind in KINDS]
    lines = {
        "train.jsonl": [json.dumps({"text": text}) for text in sorted(documents, key=_shuffled)],
        "questions.jsonl": [
            json.dumps({"prompt": f"{name} is a", "choices": choices, "answer": KINDS.index(kind)})
            for name, kind in sorted(questions, key=lambda pair: _shuffled(pair[0]))
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    for file, content in lines.items():
        (out / file).write_text("\n".join(content) + "\n", encoding="utf-8")
    return {file: len(content) for file, content in lines.items()}


def _shuffled(text: str) -> str:
    """A sort key without any order of its own, the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the task of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"questions of each kind ({HELD_OUT})")
    options = parser.parse_args(arguments)
    counts = write_task(options.out, Path(sysconfig.get_path("stdlib")), options.held_out)
    print(", ".join(f"{options.out / file}: {count} lines" for file, count in counts.items()))


if __name__ == "__main__":
    main()
