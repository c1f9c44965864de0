"""Does the small task hold what it says: true answers, no name in both files, kinds in equal numbers, equal bytes?"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.identifier_task import KINDS, main, names_in, write_task


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task of this Python."""
    out = tmp_path_factory.mktemp("task")
    main([str(out), "--held-out", "100"])
    return out


@pytest.mark.slow
def test_kinds_are_balanced_and_no_name_is_in_both(task: Path) -> None:
    """Documents and questions have each kind equally often; questions ask for names that are in no document."""
    documents = [line["text"].split(" is a ") for line in read(task / "train.jsonl")]
    questions = read(task / "questions.jsonl")
    assert set(Counter(kind for _, kind in documents).values()) == {len(documents) // 4}
    assert Counter(question["answer"] for question in questions) == dict.fromkeys(range(4), 100)
    assert all(question["choices"] == [f" {kind}" for kind in KINDS] for question in questions)
    asked = {question["prompt"].removesuffix(" is a") for question in questions}
    assert len(asked) == 400 and not asked & {name for name, _ in documents}


def test_answers_are_those_of_python(task: Path) -> None:
    """Names of modules that are imported are of the kind that ``inspect`` finds."""
    kinds = {line["text"].split(" is a ")[0]: line["text"].split(" is a ")[1] for line in read(task / "train.jsonl")}
    kinds |= {line["prompt"].removesuffix(" is a"): KINDS[line["answer"]] for line in read(task / "questions.jsonl")}
    seen: Counter[str] = Counter()
    for module in map(importlib.import_module, ("argparse", "inspect", "collections", "shutil", "tarfile", "typing")):
        for name, value in vars(module).items():
            if name not in kinds or getattr(value, "__module__", module.__name__) != module.__name__:
                continue
            if not (inspect.isclass(value) or inspect.isfunction(value) or name.isupper()):
                continue
            found = "class" if inspect.isclass(value) else "function" if inspect.isfunction(value) else "constant"
            assert kinds[name] == found, name
            seen[found] += 1
    assert seen["class"] > 10 and seen["function"] > 10 and seen["constant"] > 10


def test_the_same_library_gives_the_same_bytes(tmp_path: Path) -> None:
    """Names of two kinds, special and short ones are in neither file; a second call writes the same."""
    (tmp_path / "library").mkdir()
    source = "".join(
        f"class Thing{i}:\n    def act_{i}(self): ...\n    def shared(self): ...\n    def __len__(self): ...\n"
        f"def make_{i}(): ...\nLIMIT_{i} = {i}\nab = 1\n"
        for i in range(4)
    )
    (tmp_path / "library" / "module.py").write_text(source + "def shared(): ...\n")
    counts = [write_task(tmp_path / out, tmp_path / "library", 1) for out in ("one", "two")]
    assert counts == [{"train.jsonl": 12, "questions.jsonl": 4}] * 2
    for file in counts[0]:
        content = (tmp_path / "one" / file).read_bytes()
        assert content == (tmp_path / "two" / file).read_bytes()
        assert b"shared" not in content and b"__len__" not in content
    with pytest.raises(SystemExit, match="4 names of the rarest kind"):
        write_task(tmp_path / "none", tmp_path / "library", 4)


def test_what_a_module_defines() -> None:
    """Functions inside functions and lower-case variables are not names of the task; nested classes are."""
    tree = ast.parse(
        "def outer():\n    def inner(): ...\n    class Local:\n        def go(self): ...\nlow = HIGH = 1\n"
    )
    assert sorted(names_in(tree)) == [
        ("HIGH", "constant"),
        ("Local", "class"),
        ("go", "method"),
        ("outer", "function"),
    ]
