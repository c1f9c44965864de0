"""Measurements of the package's structure: every import is resolved, every figure is that of a package read by eye."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.house.__main__ import main
from tools.house.files import measure, storey_of
from tools.house.imports import circles_of, read_package

FILES = {
    "__init__.py": "",
    "__main__.py": "from house.cli import go\n",
    "cli/__init__.py": "def go():\n    from house.lab.report import page\n    return page\n",
    "engine/__init__.py": "from . import step\n",
    "engine/step.py": (
        "from typing import (\n    TYPE_CHECKING,\n)\n\nif TYPE_CHECKING:\n    from .hooks import Hook\n\n\n"
        "class Step:\n    pass\n"
    ),
    "engine/hooks.py": (
        "from ..ops import launch\n\n\nclass Hook:\n    def made(self):\n        from . import step, parts\n"
    ),
    "engine/parts.py": "class Step:\n    pass\n\n\ndef _own():\n    pass\n",
    "ops/__init__.py": "",
    "ops/launch.py": "import house.lab.report, json\nfrom house.engine.parts import Step as Other\n\nStep = Other\n",
    "ops/note.py": "def _own():\n    pass\n",
    "lab/__init__.py": "",
    "lab/report.py": "from house.ops.note import _own\n\npage = _own\n",
}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for name, text in {**{f"house/{name}": text for name, text in FILES.items()}, "tests/test_a.py": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "house"


def test_imports_are_those_of_modules(folder: Path) -> None:
    """Relative ones, of modules from a package, in functions and for types; others are left out."""
    files = read_package(folder)
    assert len(files) == len(FILES)
    found = {
        name.removeprefix("house."): {one.removeprefix("house.") for one in f.imports} for name, f in files.items()
    }
    assert {name: others for name, others in found.items() if others} == {
        "__main__": {"cli"},
        "cli": {"lab.report"},
        "engine": {"engine.step"},
        "engine.step": {"engine.hooks"},
        "engine.hooks": {"ops.launch", "engine.step", "engine.parts"},
        "ops.launch": {"lab.report", "engine.parts"},
        "lab.report": {"ops.note"},
    }
    assert files["house.engine.step"].import_lines == 4
    assert files["house.engine.parts"].names == {"Step"}


def test_figures_are_counted(folder: Path) -> None:
    """Importers, neighbours, circles, storeys and meanings of the small package."""
    figures, lists = measure(folder, folder.parent / "tests")
    expected = {
        "files": 12,
        "folders": 5,
        "files with exactly one importer": 3,
        "those whose importer is in the same folder": 1,
        "those whose importer is a neighbour": 1,
        "those that no test imports either": 1,
        "circles of files": 1,
        "files in circles": 2,
        "circles of folders": 1,
        "folders in circles": 3,
        "circles of rooms": 1,
        "rooms in circles": 2,
        "imports core -> ops": 1,
        "imports core -> lab": 0,
        "imports ops -> lab": 1,
        "imports lab -> top": 0,
        "names with more than one meaning": 1,
    }
    assert {name: figures[name] for name in expected} == expected
    assert lists["imports core -> ops"] == ["house.engine.hooks -> house.ops.launch"]
    assert lists["circles of files"] == ["house.engine.hooks, house.engine.step"]
    assert lists["names with more than one meaning"] == ["Step: house.engine.parts, house.engine.step"]
    (folder.parent / "tests" / "test_a.py").write_text("import house.engine.hooks\n", encoding="utf-8")
    assert measure(folder, folder.parent / "tests")[0]["those that no test imports either"] == 0


def test_a_circle_needs_a_way_back() -> None:
    """A chain is none, and a node that needs itself neither; two circles with an arrow between them stay two."""
    graph = {"a": "b", "b": "ac", "c": "d", "d": "c", "e": "ea"}
    assert circles_of({name: frozenset(others) for name, others in graph.items()}) == [["a", "b"], ["c", "d"]]


def test_storeys_without_files_have_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures a package of this repository; what does not exist is null, and is no zero."""
    assert main(["files", "--package", "tools", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["command"] == "python -m tools.house files --package tools"
    assert result["figures"]["files"] > 100 and result["lists"] == {}
    assert result["figures"]["imports ops -> lab"] is None
    assert [storey_of(f"megasdc{name}") for name in ("", ".sdc.vote", ".ops.top", ".cli.run")] == [
        *("core", "core", "ops", "top")
    ]


def test_a_wrong_place_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the folder, or the file, and what to do."""
    assert main(["files", "--package", "docs"]) == 2
    assert "docs: no __init__.py there" in capsys.readouterr().err
    (tmp_path / "__init__.py").write_text("import\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"__init__\.py: no Python of this interpreter"):
        read_package(tmp_path)
