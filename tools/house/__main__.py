"""Command line of ``python -m tools.house``, from the repository's folder."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tools.bench.machine import ROOT, describe_machine
from tools.bench.result import Result
from tools.house.files import Structure, measure

EXAMPLES = """examples:
  python -m tools.house files
  python -m tools.house files --list
  python -m tools.house files --json > before.json
"""
WIDTH = 2000
"""Characters of a line where standard output is no terminal, so that none is cut."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print the result."""
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
    for command in commands.choices.values():
        command.add_argument("--list", action="store_true", help="also what the figures count")
        command.add_argument("--json", action="store_true", help="the result as JSON")
    given = parser.parse_args(argv)
    try:
        result: Result = given.call(given, _machine(argv))
    except ValueError as error:
        print(f"tools.house: error: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"passed": True, **result.as_dict()}, indent=1))
    else:
        result.render(Console() if sys.stdout.isatty() else Console(width=WIDTH))
    return 0


def _machine(argv: Sequence[str]) -> dict[str, Any]:
    words = [word for word in argv if word != "--json"]
    return {**describe_machine(), "command": shlex.join(["python", "-m", "tools.house", *words])}


def _files(given: argparse.Namespace, machine: dict[str, Any]) -> Result:
    figures, lists = measure(ROOT / given.package, ROOT / "tests")
    return Structure(machine, {"package": given.package}, figures, lists if given.list else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
