"""Command line of ``python -m tools.house``, from the repository's folder."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megasdc.config.table import with_tables
from tools.bench.machine import ROOT, describe_machine
from tools.bench.result import Report, Result
from tools.house.entered import Entered, count
from tools.house.files import Structure, measure
from tools.house.imports import read_package
from tools.house.picture import MARKER, draw

EXAMPLES = """examples:
  python -m tools.house files
  python -m tools.house files --list
  python -m tools.house entered
  python -m tools.house entered --config configs/bounded.json --list
  python -m tools.house picture --check docs/design/layers.md
  python -m tools.house hooks --check docs/design/hooks.md
  python -m tools.house all --json > before.json
"""
WIDTH = 2000
"""Characters of a line where standard output is no terminal, so that none is cut."""


@dataclass(frozen=True)
class House(Result):
    """Both measurements."""

    also = ()

    structure: Structure
    trainings: Entered

    def report(self) -> Report:
        """Tables and lists of both."""
        yield from self.structure.report()
        yield from self.trainings.report()

    def as_dict(self) -> dict[str, Any]:
        """Fields of both, and what they print."""
        both = self.structure.as_dict(), self.trainings.as_dict()
        options = both[0]["options"] | both[1]["options"]
        return both[0] | both[1] | {"options": options, "report": both[0]["report"] + both[1]["report"]}


def main(argv: Sequence[str]) -> int:
    """Measure or draw, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.house",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("files", help="sizes, importers, circles, storeys, names with several meanings")
    one.add_argument("--package", default="megasdc", help="folder of the package; default megasdc")
    one.set_defaults(call=_files)
    one = commands.add_parser("entered", help="files that one rank enters at its start, in steps, a save, a verdict")
    one.add_argument("--config", type=Path, help="file whose features the tiny training has; default none")
    one.set_defaults(call=_entered)
    one = commands.add_parser("all", help="both, in one result")
    one.add_argument("--package", default="megasdc", help="folder of the package; default megasdc")
    one.add_argument("--config", type=Path, help="see entered")
    one.set_defaults(call=_all)
    for command in commands.choices.values():
        command.add_argument("--list", action="store_true", help="also what the figures count")
    one = commands.add_parser("picture", help="rooms and their imports as a picture in Mermaid")
    one.add_argument("--package", default="megasdc", help="folder of the package; default megasdc")
    one.add_argument("--check", type=Path, metavar="PAGE", help="exit code 1 if the page's picture is out of date")
    one.add_argument("--write", type=Path, metavar="PAGE", help="put it between the page's markers")
    one.set_defaults(call=_picture)
    one = commands.add_parser("hooks", help="the order of a run's hooks as a table in Markdown")
    one.add_argument("--check", type=Path, metavar="PAGE", help="exit code 1 if the page's table is out of date")
    one.add_argument("--write", type=Path, metavar="PAGE", help="put it between the page's markers")
    one.set_defaults(call=_hooks)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="the result as JSON")
    given = parser.parse_args(argv)
    try:
        return int(given.call(given, argv))
    except (OSError, ValueError) as error:
        print(f"tools.house: error: {error}", file=sys.stderr)
        return 2


def _files(given: argparse.Namespace, argv: Sequence[str]) -> int:
    return _show(given, _structure(given, _machine(argv)))


def _entered(given: argparse.Namespace, argv: Sequence[str]) -> int:
    return _show(given, _trainings(given, _machine(argv)))


def _all(given: argparse.Namespace, argv: Sequence[str]) -> int:
    machine = _machine(argv)
    return _show(given, House(machine, {}, _structure(given, machine), _trainings(given, machine)))


def _structure(given: argparse.Namespace, machine: dict[str, Any]) -> Structure:
    figures, lists = measure(ROOT / given.package, ROOT / "tests")
    return Structure(machine, {"package": given.package}, figures, lists if given.list else {})


def _trainings(given: argparse.Namespace, machine: dict[str, Any]) -> Entered:
    return Entered(machine, {"config": given.config}, count(given.config), given.list)


def _picture(given: argparse.Namespace, argv: Sequence[str]) -> int:
    return _publish(given, argv, "picture", draw(read_package(ROOT / given.package)), MARKER)


def _hooks(given: argparse.Namespace, argv: Sequence[str]) -> int:
    from tools.house import hooks  # with PyTorch

    return _publish(given, argv, "hooks", hooks.draw_table(), hooks.MARKER)


def _publish(given: argparse.Namespace, argv: Sequence[str], name: str, made: str, marker: str) -> int:
    """Print what was made for a page, put it there, or look whether it is there."""
    if given.json:
        print(json.dumps({"machine": _machine(argv), name: made}, indent=1))
    elif not given.check and not given.write:
        print(made, end="")
    if given.write:
        given.write.write_text(with_tables(given.write, {marker: lambda: made})[1], encoding="utf-8")
    if given.check and len(set(with_tables(given.check, {marker: lambda: made}))) > 1:
        command = f"python -m tools.house {name} --write {given.check}"
        print(f"{given.check}: the {name} of the page is out of date; run: {command}", file=sys.stderr)
        return 1
    return 0


def _show(given: argparse.Namespace, result: Result) -> int:
    if given.json:
        print(json.dumps({"passed": True, **result.as_dict()}, indent=1))
    else:
        result.render(Console() if sys.stdout.isatty() else Console(width=WIDTH))
    return 0


def _machine(argv: Sequence[str]) -> dict[str, Any]:
    words = [word for word in argv if word != "--json"]
    return {**describe_machine(), "command": shlex.join(["python", "-m", "tools.house", *words])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
