"""Structure of a package in figures: sizes, who imports whom, circles, storeys, names with several meanings.

Storeys, from below: core is every room of the package but the named ones, ``ops`` and ``lab`` are the folders of these
names, and the top is ``cli`` and ``__main__``. An import counts wherever it stands, also in a function and for types
alone; a module that is started by its name, as by ``python -m``, counts as imported by none. A neighbour is a file of
the same folder but its ``__init__``, which may be the list of what is in it; an ``__init__`` itself is not counted
among the files with one importer.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench.result import Report, Result, table
from tools.house.imports import File, circles_of, imports_of, read_package

STOREYS = ("core", "ops", "lab", "top")
UPPER = ("ops", "lab")
TOP = ("api", "cli", "entry", "experiments", "features", "pretrain", "__main__")
"""Folders and modules on top of all storeys, which compose them."""


@dataclass(frozen=True)
class Structure(Result):
    """Figures of a package.

    Args:
        figures: numbers by what they count; None where it does not exist yet.
        lists: what the numbers count, each a list of lines; empty unless asked for.
    """

    also = ()

    figures: dict[str, int | float | None]
    lists: dict[str, list[str]] = field(repr=False)

    def report(self) -> Report:
        """The figures, and a table a list."""
        rows = [(name, "-" if value is None else f"{value:,}") for name, value in self.figures.items()]
        yield table("structure", ("figure", "value"), rows)
        for name, lines in self.lists.items():
            yield f"{name}:"
            yield from (f"  {line}" for line in lines)


def room_of(module: str) -> str:
    """Room of a module: its first name below the package, in an upper storey the first two."""
    names = module.split(".")[1:] or ["__init__"]
    return ".".join(names[: 2 if names[0] in UPPER else 1])


def storey_of(module: str) -> str:
    """Storey of a module of the package."""
    room = room_of(module).partition(".")[0]
    return "top" if room in TOP else room if room in UPPER else "core"


def upward(files: Mapping[str, File]) -> dict[str, list[tuple[str, str]]]:
    """Imports (file, imported) from one storey to a higher one, by the pair of storeys."""
    found: dict[str, list[tuple[str, str]]] = {
        f"{low} -> {high}": [] for place, low in enumerate(STOREYS) for high in STOREYS[place + 1 :]
    }
    for name, file in sorted(files.items()):
        for other in sorted(file.imports):
            if (pair := f"{storey_of(name)} -> {storey_of(other)}") in found:
                found[pair].append((name, other))
    return found


def measure(folder: Path, tests: Path) -> tuple[dict[str, int | float | None], dict[str, list[str]]]:
    """Figures of a package, and what they count as lists.

    Args:
        folder: the package's.
        tests: folder whose files are looked at for imports of the package.

    Raises:
        ValueError: there is no package, or a file is no Python.
    """
    files = read_package(folder)
    importers: dict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        for other in file.imports:
            importers[other].append(name)
    single = {name: found[0] for name, found in importers.items() if len(found) == 1 and not files[name].is_init}
    same = {name: one for name, one in single.items() if files[one].folder == files[name].folder}
    near = {name: one for name, one in same.items() if not files[one].is_init}
    tested = _imported_by(tests, {name: file.path for name, file in files.items()})
    circles = circles_of({name: file.imports for name, file in files.items()})
    folders = circles_of(_merged(files, {name: file.folder for name, file in files.items()}))
    rooms = circles_of(rooms_of(files))
    meanings = _meanings(files)
    arrows = upward(files)
    lines, imports = (sum(values) for values in zip(*((f.lines, f.import_lines) for f in files.values()), strict=True))
    there = {storey_of(name) for name in files}
    figures: dict[str, int | float | None] = {
        "files": len(files),
        "folders": len({file.folder for file in files.values()}),
        "lines": lines,
        "lines of a file, median": statistics.median(file.lines for file in files.values()),
        "lines of imports": imports,
        "lines of imports, %": round(100 * imports / lines, 2),
        "files with exactly one importer": len(single),
        "those whose importer is in the same folder": len(same),
        "those whose importer is a neighbour": len(near),
        "those that no test imports either": len(near.keys() - tested),
        "circles of files": len(circles),
        "files in circles": sum(map(len, circles)),
        "circles of folders": len(folders),
        "folders in circles": sum(map(len, folders)),
        "circles of rooms": len(rooms),
        "rooms in circles": sum(map(len, rooms)),
        **{f"imports {pair}": len(found) if {*pair.split(" -> ")} <= there else None for pair, found in arrows.items()},
        "names with more than one meaning": len(meanings),
    }
    lists = {
        "files with exactly one importer": [f"{name} <- {one}" for name, one in sorted(single.items())],
        "those whose importer is a neighbour": [
            f"{name} <- {one}" + " (and tests)" * (name in tested) for name, one in sorted(near.items())
        ],
        "circles of files": list(map(", ".join, circles)),
        "circles of folders": list(map(", ".join, folders)),
        "circles of rooms": list(map(", ".join, rooms)),
        **{f"imports {pair}": [f"{name} -> {other}" for name, other in found] for pair, found in arrows.items()},
        "names with more than one meaning": [f"{name}: {', '.join(where)}" for name, where in meanings],
    }
    return figures, lists


def rooms_of(files: Mapping[str, File]) -> dict[str, frozenset[str]]:
    """Rooms, each with the others that it imports."""
    return _merged(files, {name: room_of(name) for name in files})


def _merged(files: Mapping[str, File], groups: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Imports between groups of files, each file in the group of its module."""
    graph: dict[str, set[str]] = {group: set() for group in groups.values()}
    for name, file in files.items():
        graph[groups[name]] |= {groups[other] for other in file.imports} - {groups[name]}
    return {group: frozenset(others) for group, others in graph.items()}


def _meanings(files: Mapping[str, File]) -> Sequence[tuple[str, list[str]]]:
    """Public names of classes and functions that several files define, with the files; the most frequent first."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, file in sorted(files.items()):
        for name in file.names:
            places[name].append(module)
    return sorted(
        ((name, where) for name, where in places.items() if len(where) > 1), key=lambda one: (-len(one[1]), one)
    )


def _imported_by(tests: Path, modules: Mapping[str, Path]) -> frozenset[str]:
    """Modules that files of a folder of tests import."""

    def found() -> Iterator[str]:
        package = next(iter(modules)).partition(".")[0]
        for path in tests.rglob("*.py"):
            if package in path.read_text(encoding="utf-8"):
                yield from imports_of(path, "tests", modules)

    return frozenset(found())
