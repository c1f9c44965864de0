"""Imports between storeys and rooms: what a storey may import, the order of its rooms, which rooms need no torch.

The core is what a training needs. ``ops`` surrounds a run on its hosts, ``lab`` is what is asked afterwards or in
experiments. lab may import ops and the core, ops the core, the core neither; ``cli`` composes them.
"""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megasdc

PACKAGE = Path(megasdc.__file__).parent
STOREYS = {
    **{"ops": 1, "lab": 2},
    **dict.fromkeys(("api", "cli", "entry", "experiments", "features", "pretrain", "__main__"), 3),
}
"""Storeys by the first name below the package; every other one is the core, 0. A storey imports those below it only."""
ROOMS = {
    # core: what a training needs, the protections in the step included
    "common": 0,
    "events": 1,
    "config": 1,
    "output": 1,
    "tensors": 2,
    "parallel": 2,
    "determinism": 2,
    "distributions": 2,
    "metrics": 3,
    "data": 3,
    "model": 3,
    "optim": 3,
    "checkpoint": 3,
    "engine": 3,
    "interchange": 4,
    "dropcompute": 4,
    "faults": 4,
    "sdc": 4,
    "attached": 5,
    "localsgd": 5,
    "train": 6,
    # ops: what surrounds a run on its hosts
    "ops/cluster": 0,
    "ops/archive": 0,
    "ops/devices": 0,
    "ops/health": 1,
    "ops/launch": 2,
    "ops/golden": 2,
    "ops/supervise": 3,
    "ops/stress": 3,
    "ops/determinism_check": 3,
    "ops/preflight": 4,
    "ops/run_folder": 4,
    "ops/top": 5,
    # lab: what is asked afterwards or in experiments
    "lab/checkpoints": 0,
    "lab/planning": 0,
    "lab/studies": 0,
    "lab/traces": 0,
    "lab/sweeps": 1,
    "lab/triage": 1,
    "lab/report": 2,
    # what composes them
    "features": 0,
    "api": 0,
    "pretrain": 1,
    "cli": 0,
    "entry": 2,
    "experiments": 0,
    "__main__": 1,
}
"""Layer of each room in its storey: a room imports rooms of lower layers of its storey only."""
SIDEWAYS = ["metrics", "data", "model", "optim", "checkpoint", "engine"]
"""Inside layer 3 of the core a room may import those before it."""
NO_TORCH = {"common", "events", "config", "output"}


def room_of(file):
    """Return the room of a file: the first name below its storey, with the storey's where that is ops or lab."""
    names = file.relative_to(PACKAGE).with_suffix("").parts
    return room_of_names(("megasdc", *names))


def room_of_names(names):
    """Return the room of a module by its dotted name's parts; the empty text for the package or a storey itself."""
    depth = 3 if len(names) > 1 and names[1] in ("ops", "lab") else 2
    return "" if len(names) < depth or names[depth - 1] == "__init__" else "/".join(names[1:depth])


def storey_of(room):
    """Return the storey of a room: 0 is the core."""
    return STOREYS.get(room.partition("/")[0], 0)


def imported(file):
    """Yield (line, dotted module) of every import statement in a file, also inside functions."""
    package = ["megasdc", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inside = PACKAGE.parent.joinpath(*module.split("."))
            submodules = [alias.name for alias in node.names if _is_module(inside / alias.name)]
            yield from ((node.lineno, f"{module}.{name}") for name in submodules)
            if len(submodules) < len(node.names):
                yield node.lineno, module


def _is_module(path):
    return path.is_relative_to(PACKAGE) and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def imported_rooms(file):
    """Yield (line, room) of what a file imports of the package, but for its own room."""
    for line, module in imported(file):
        names = module.split(".")
        if names[0] == "megasdc" and (room := room_of_names(names)) and room != room_of(file):
            yield line, room


def may_import(room, other):
    """Return whether the order of rooms lets one import another of the same storey."""
    if ROOMS[room] != ROOMS[other]:
        return ROOMS[room] > ROOMS[other]
    return room in SIDEWAYS and SIDEWAYS.index(other) < SIDEWAYS.index(room)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_a_layer():
    """A new folder or module is given its place before it is used."""
    assert {room for file in FILES if (room := room_of(file))} == set(ROOMS)


def test_no_storey_imports_from_above():
    """The core imports neither ops nor lab, and ops no lab."""
    above = [
        f"{file.relative_to(PACKAGE)}:{line} imports {other}"
        for file in FILES
        for line, other in imported_rooms(file)
        if storey_of(other) > storey_of(room_of(file))
    ]
    assert above == []


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_go_down_in_a_storey(room):
    """No room imports from a layer above it in its storey, nor sideways but in the stated order."""
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {other}"
        for file in FILES
        if room_of(file) == room
        for line, other in imported_rooms(file)
        if storey_of(other) == storey_of(room) and not may_import(room, other)
    ]
    assert wrong == []


def test_no_modules_import_each_other():
    """No circle, not even inside functions or for types alone: what two modules share is in a third."""
    modules = {".".join(("megasdc", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in FILES}
    graph = {
        name: {module for _, module in imported(file) if module in modules and module != name}
        for name, file in modules.items()
    }
    assert len(graph) > 200 and sum(map(len, graph.values())) > 1000, "the imports were found"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) in NO_TORCH], ids=lambda file: file.stem)
def test_lowest_layers_name_no_torch(file):
    """What lies at the bottom imports neither torch nor what brings it along, at any level of a file."""
    heavy = {"torch", "deepspeed", "megatron", "transformers", "datasets"}
    assert [module for _, module in imported(file) if module.split(".")[0] in heavy] == []


@pytest.mark.parametrize(
    "module",
    [
        "megasdc.config.load",
        "megasdc.config.repeatability",
        "megasdc.config.table",
        "megasdc.events",
        "megasdc.cli",
        "megasdc.ops.launch.records",
        "megasdc.train.main",
        "megasdc.common.versions",
        "megasdc.ops.determinism_check.rank",
    ],
)
def test_importing_brings_no_torch(module):
    """The command line starts without the seconds that torch takes, and a rank can still set what torch reads once."""
    code = f"import {module}, sys; assert not {{'torch', 'numpy', 'deepspeed'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_packages_import_nothing():
    """A name has one module to import it from: of packages, megasdc itself and its command line alone give any."""
    composes = {PACKAGE / "__init__.py", PACKAGE / "cli" / "__init__.py"}
    packages = {file for file in FILES if file.name == "__init__.py"} - composes
    assert [str(file.relative_to(PACKAGE)) for file in sorted(packages) if list(imported(file))] == []


def test_parallel_state_is_initialised_in_one_place():
    """Only parallel/groups.py builds Megatron-core's groups."""
    callers = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) == "initialize_model_parallel"
    ]
    assert set(callers) <= {"parallel/groups.py"}


def test_only_the_stated_rooms_see_the_whole_configuration():
    """RunConfig and its loaders are named in config, train, and above the core only."""
    whole = {"RunConfig", "load_config", "parse_config"}
    seen = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and whole & {alias.name for alias in node.names}
    }
    allowed = ("config/", "train/", "ops/", "lab/", "cli/", "entry/", "api.py", "features.py")
    assert [file for file in sorted(seen) if not file.startswith(allowed)] == []


def test_the_map_names_files_that_there_are():
    """In the map of the repository, a name of one word in backticks is a file or folder of that room."""
    page = (PACKAGE.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    page = page[page.index("## Map of the repository") :]
    rows = re.findall(r"^\| `megasdc/([\w/]+)/`[^|]*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    absent = [
        (room, name)
        for room, text in rows
        for name in re.findall(r"`([a-z_0-9]+)`", text)
        if not any(one.stem == name for one in (PACKAGE / room).rglob("*"))
    ]
    assert absent == []


BENCHMARK_TESTS = re.compile(r"unit/bench/.*|(distributed|end_to_end)/test_bench\w*\.py|gpu/part_bench\.py")
"""Tests of benchmarks, in tests/. That of the documentation names their commands beside those of the package."""


def _imported_by(file):
    """Yield every dotted name that a file of tests or tools imports, also within text that it runs as a program."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?:from|import) (tools\.bench[\w.]*)", node.value)


def test_only_tests_of_benchmarks_import_them():
    """Others share what they need in tools/trainings, which imports no benchmark either; no tool imports tests."""
    tests, tools = PACKAGE.parent / "tests", PACKAGE.parent / "tools"
    found = {
        str(file.relative_to(tests))
        for file in tests.rglob("*.py")
        if any(name.startswith("tools.bench") for name in _imported_by(file))
    }
    assert len(found) > 20, "imports of benchmarks were found"
    assert {one for one in found if not BENCHMARK_TESTS.fullmatch(one)} == {"end_to_end/test_documentation.py"}
    shared = [name for file in (tools / "trainings").glob("*.py") for name in _imported_by(file)]
    assert shared and not any(name.startswith("tools.bench") for name in shared)
    assert not any(name.split(".")[0] == "tests" for file in tools.rglob("*.py") for name in _imported_by(file))
