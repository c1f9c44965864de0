"""Measurements of the package's structure: every import is resolved, every figure is that of a package read by eye."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.config.checks import check_layout
from megasdc.config.load import parse_config
from tools.house import rank
from tools.house.__main__ import main
from tools.house.entered import files_of, tiny, with_checks, with_faults
from tools.house.files import measure, storey_of
from tools.house.imports import circles_of, read_package
from tools.house.picture import draw, essential

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


PICTURE = """```mermaid
flowchart TD
  subgraph top
    r___main__["__main__"]
    r_cli["cli"]
  end
  subgraph lab
    r_lab_report["lab.report"]
  end
  subgraph ops
    r_ops_launch["ops.launch"]
    r_ops_note["ops.note"]
  end
  subgraph core
    r_engine["engine"]
  end
  r___main__ --> r_cli
  r_cli --> r_lab_report
  r_engine --> r_ops_launch
  r_lab_report --> r_ops_note
  r_ops_launch --> r_engine & r_lab_report
```
"""


def test_the_picture_shows_rooms_in_their_storeys(folder: Path, tmp_path: Path) -> None:
    """A page with another one is out of date until it is written; one without markers is refused."""
    assert draw(read_package(folder)) == PICTURE
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- house-picture:begin -->\nold\n<!-- house-picture:end -->\nafter\n", encoding="utf-8")
    given = ["picture", "--package", str(folder)]
    assert main([*given, "--check", str(page)]) == 1
    assert main([*given, "--write", str(page)]) == main([*given, "--check", str(page)]) == 0
    whole = page.read_text(encoding="utf-8")
    assert whole == f"Before\n<!-- house-picture:begin -->\n{PICTURE}<!-- house-picture:end -->\nafter\n"
    for text in ("", whole * 2, whole.replace(":begin", ":end"), f"<!-- house-picture:end -->{whole}"):
        page.write_text(text, encoding="utf-8")
        assert main([*given, "--check", str(page)]) == 2


def test_arrows_that_follow_are_left_out() -> None:
    """But those of circles; two arrows into one circle stand for each other, and both stay."""
    graph = {"a": "bcd", "b": "cd", "c": "d", "d": "", "e": "fg", "f": "g", "g": "f"}
    drawn = essential({name: frozenset(others) for name, others in graph.items()})
    assert {name: "".join(sorted(others)) for name, others in drawn.items()} == {
        **{"a": "b", "b": "c", "c": "d", "d": ""},
        **{"e": "fg", "f": "g", "g": "f"},
    }


REPOSITORY = {
    "launch/pretrain_gpt.py": "import os\nfrom megasdc.loop import train\ntrain()\nos._exit(3)\n",
    "megasdc/__init__.py": "",
    "megasdc/only_body.py": "class Held:\n    pass\n",
    "megasdc/work.py": "def work():\n    pass\n",
    "megasdc/save.py": "def save():\n    pass\n",
    "megasdc/watch.py": (
        "asked, answers = [], []\n\ndef watch():\n    answer()\n    while not asked:\n        pass\n    answer()\n\n"
        "def answer():\n    answers.append(1)\n"
    ),
    "megasdc/loop.py": (
        "import threading\nfrom megasdc import only_body, save, watch, work\n\ndef train():\n"
        "    work.work()\n    threading.Thread(target=watch.watch).start()\n"
        "    while not watch.answers:\n        pass\n"
        "    for step in range(3):\n        train_step(step)\n    save.save()\n\n"
        "def train_step(step):\n    if step == 0:\n        work.work()\n    if step == 1:\n"
        "        aside = threading.Thread(target=save.save)\n        aside.start()\n        aside.join()\n"
        "        watch.asked.append(1)\n        while len(watch.answers) < 2:\n            pass\n"
    ),
}


def test_functions_count_in_the_phase_in_which_they_are_called(tmp_path: Path) -> None:
    """Steps begin and end with the loop's function; a thread counts in the phase in which it began."""
    script = tmp_path / "tools" / "house" / "rank.py"
    for name, text in {**REPOSITORY, "tools/house/rank.py": Path(rank.__file__).read_text(encoding="utf-8")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), rank.OUT_VARIABLE: str(tmp_path), "RANK": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    phases = json.loads((tmp_path / "rank_1.json").read_text(encoding="utf-8"))
    start = phases.pop("start")
    assert start.pop("__init__.py") == start.pop("only_body.py") == start.pop("save.py") == [], "bodies alone"
    assert {file: [name.partition(":")[0] for name in names] for file, names in start.items()} == {
        "loop.py": ["train"],
        "work.py": ["work"],
        "watch.py": ["watch", "answer"],
    }
    assert {phase: sorted(files) for phase, files in phases.items()} == {
        "step 1": ["loop.py", "work.py"],
        "after 1": [],
        "step 2": ["loop.py", "save.py"],
        "after 2": [],
        "threads": ["watch.py"],
        "step 3": ["loop.py"],
        "after 3": ["save.py"],
    }


def test_what_comes_on_top_is_what_the_plain_step_lacks() -> None:
    """And of a resume what the first start did not call, of a verdict neither checks nor the fault itself."""
    plain = {"start": {"a": ["f:1"], "b": []}, "step 3": {"a": ["g:2"]}, "step 4": {"a": ["g:2"], "save": ["s:1"]}}
    resumed = {"start": {"a": ["f:1"], "b": ["load:3"], "c": []}}
    checked = {"start": {}, "step 3": {}, "step 4": {"a": ["g:2"], "check": ["c:1"]}}
    faults = {
        "start": {},
        "step 3": {"a": ["g:2"], "fault": ["i:1"]},
        "step 4": {"a": ["g:2"], "check": ["c:1"], "fault": ["i:1"], "verdict": ["v:1"]},
    }
    assert files_of(plain, resumed, checked, faults) == {
        "start to first step": ["a", "b"],
        "of them with a function called": ["a"],
        "a plain step": ["a"],
        "a checked step": ["a", "check"],
        "a synchronous save, on top": ["save"],
        "resume from disk": ["b"],
        "a verdict, on top": ["verdict"],
    }
    with pytest.raises(ValueError, match=r"training 'faults' has no step 4, but start, step 3: .*STEP in tools"):
        files_of(plain, resumed, checked, {"start": {}, "step 3": {}})


def test_every_example_becomes_small(tmp_path: Path) -> None:
    """A configuration keeps its features, and is one that the package takes, with checks and with faults."""
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if "study" in raw["megasdc"]:
            continue
        made = tiny(raw, tmp_path)
        for one in (made, with_checks(made), with_faults(with_checks(made))):
            config = parse_config(json.loads(json.dumps(one)), source=path.name)
            check_layout(config, 2)
        assert not made["megasdc"].keys() & {"faults", "process_faults"}
        assert made["megasdc"].get("drop_compute") == raw["megasdc"].get("drop_compute")
