"""Imports go down in layers only, and the lowest layers need no torch."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import megasdc

PACKAGE = Path(megasdc.__file__).parent
LAYERS = {
    "errors": -1,
    "credentials": -1,
    "addresses": 0,
    "durable": -1,
    "imports": 0,
    "moment": 0,
    "origin": 0,
    "room": 0,
    "shared_memory": 0,
    "wire": 0,
    "memory_limits": 1,
    "program": 1,
    "progress": 1,
    "events": 1,
    "run_identity": 1,
    "run_lock": 1,
    "versions": 1,
    "config": 1,
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
    "archive": 4,
    "interchange": 4,
    "dropcompute": 4,
    "faults": 4,
    "sdc": 4,
    "study": 4,
    "health": 4,
    "guard": 5,
    "launcher": 5,
    "supervisor": 6,
    "train": 5,
    "golden": 6,
    "preflight": 7,
    "repeat": 7,
    "stress": 7,
    "experiments": 7,
    "report": 8,
    "triage": 9,
    "cli": 10,
    "__main__": 11,
}
SIDEWAYS = ["metrics", "data", "model", "optim", "checkpoint", "engine"]
"""Inside layer 3 a part may import those before it."""
ROOMS = {
    "checkpoint": ["formats", "", "snapshots", "planning", "views", "compare"],
    "supervisor": ["", "planning"],
}
"""Folders inside a part: each may import itself and those before it; the empty name stands for the part's own files."""
NO_TORCH = {
    "errors",
    "credentials",
    "addresses",
    "durable",
    "imports",
    "moment",
    "origin",
    "shared_memory",
    "wire",
    "events",
    "run_identity",
    "run_lock",
    "versions",
    "config",
}


def part_of(file):
    """Return the first name below the package: a folder, or a module without its ending."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file):
    """Yield (line, dotted module) of every import statement in a file, also inside functions."""
    package = ["megasdc", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module in {"megasdc", *(f"megasdc.{part}" for part in ROOMS)}:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def submodules_imported(file):
    """Yield every dotted name that may be an imported module: of ``from a import b`` both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    yield from (module for _, module in imported(file))


def may_import(part, other):
    """Tell whether the rule lets one part import another."""
    if part == other:
        return True
    if LAYERS[part] != LAYERS[other]:
        return LAYERS[part] > LAYERS[other]
    return part in SIDEWAYS and SIDEWAYS.index(other) < SIDEWAYS.index(part)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_part_has_a_layer():
    """A new folder or module is given its place before it is used."""
    assert {part_of(file) for file in FILES} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("part", sorted({part_of(file) for file in FILES} - {"__init__"}))
def test_imports_go_down(part):
    """No part imports from a layer above it, nor sideways but in the stated order."""
    wrong = []
    for file in FILES:
        if part_of(file) != part:
            continue
        for line, module in imported(file):
            names = module.split(".")
            if names[0] == "megasdc" and len(names) > 1 and names[1] in LAYERS and not may_import(part, names[1]):
                wrong.append(f"{file.relative_to(PACKAGE)}:{line} imports {module}")
    assert wrong == []


def room_of(names, rooms):
    """Return the room of a module inside a part, from its names below the part; the empty one for the part's own."""
    return names[0] if names and names[0] in rooms else ""


@pytest.mark.parametrize("part", ROOMS)
def test_imports_inside_a_part_go_one_way(part):
    """A room of a part imports no room that stands after it, and every folder of the part has its place."""
    rooms, wrong = ROOMS[part], []
    assert {entry.name for entry in (PACKAGE / part).iterdir() if (entry / "__init__.py").is_file()} <= set(rooms)
    for file in (PACKAGE / part).rglob("*.py"):
        own = rooms.index(room_of(file.relative_to(PACKAGE / part).parts, rooms))
        for line, module in imported(file):
            names = module.split(".")
            if names[:2] == ["megasdc", part] and rooms.index(room_of(names[2:], rooms)) > own:
                wrong.append(f"{file.relative_to(PACKAGE)}:{line} imports {module}")
    assert wrong == []


def test_no_modules_import_each_other():
    """No circle, not even inside functions or for types alone: what two modules share is in a third."""
    modules = {".".join(("megasdc", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in FILES}
    graph = {
        name: {module for module in submodules_imported(file) if module in modules and module != name}
        for name, file in modules.items()
    }
    assert len(graph) > 200 and sum(map(len, graph.values())) > 1000, "the imports were found"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("file", [file for file in FILES if part_of(file) in NO_TORCH], ids=lambda file: file.stem)
def test_lowest_layers_name_no_torch(file):
    """Config, events and errors import neither torch nor what brings it along, at any level of a file."""
    heavy = {"torch", "deepspeed", "megatron", "transformers", "datasets"}
    assert [module for _, module in imported(file) if module.split(".")[0] in heavy] == []


@pytest.mark.parametrize(
    "module",
    [
        "megasdc.config",
        "megasdc.config.repeatability",
        "megasdc.config.table",
        "megasdc.events",
        "megasdc.cli",
        "megasdc.launcher.records",
        "megasdc.train.main",
        "megasdc.versions.private_names",
        "megasdc.repeat.rank",
    ],
)
def test_importing_brings_no_torch(module):
    """The command line starts without the seconds that torch takes, and a rank can still set what torch reads once."""
    code = f"import {module}, sys; assert not {{'torch', 'numpy', 'deepspeed'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


def test_only_the_stated_parts_see_the_whole_configuration():
    """RunConfig and its loaders are named in config, train/build.py, the CLI and programs above the loop only."""
    whole = {"RunConfig", "load_config", "parse_config"}
    seen = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and whole & {alias.name for alias in node.names}
    }
    parts = "config cli experiments golden launcher preflight repeat report supervisor train triage"
    allowed = tuple(f"{part}/" for part in parts.split())
    assert [file for file in sorted(seen) if not file.startswith(allowed)] == []
