"""Commands that are made from dataclasses of options, and results as JSON."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from megasdc.cli.app import Application
from megasdc.common.errors import ConfigError
from tools.bench import commands
from tools.bench.options import Options, add_command, in_unit, numbers, option
from tools.bench.result import Result, plain


@dataclass(frozen=True)
class Model:
    """A part."""

    hidden: int = option(32, "Width.")
    layers: int = option(2, "Pairs of layers.", "--pairs", given=1, callback=lambda given: 2 * given)
    heads: int = 1


@dataclass(frozen=True)
class Some(Options):
    """Options of every kind."""

    steps: int = option(20, "Steps that count.", least=1)
    model: Model = field(default=Model(64, heads=4))
    sizes: tuple[int, ...] = option((1, 4), "Sizes; default: 1, 4.", least=1)
    rates: tuple[float, ...] = numbers((0.5,), "Rates.", "--rates", "0.1,0.2")
    bounds: tuple[float, ...] | None = numbers(None, "Bounds.", "--bounds", "1,2")
    wait_s: float = in_unit(1e-3, 1e-3, "Milliseconds.", "--wait-ms", least=0.0)
    skipped: int = 7


@dataclass(frozen=True)
class Measured(Result):
    """A result with a bar."""

    value: float

    @property
    def passed(self) -> bool:
        """Whether it is finite."""
        return math.isfinite(self.value)


def _invoke(*arguments: str) -> tuple[Any, list[Any]]:
    app, seen = Application(), []

    @add_command(app, "some", "--steps 3")
    def some(
        on_progress: Any,
        options: Some,
        value: Annotated[float, typer.Option("--value", help="Measured.")] = 1.0,
    ) -> Any:
        """Measure something."""
        seen.append(options)
        print("a library's line")
        return Measured({}, options, value), lambda: seen.append("afterwards")

    return CliRunner().invoke(app, [*arguments, "--json"]), seen


def test_a_command_has_the_options_of_its_dataclass() -> None:
    """Defaults are the fields'; what is given is read into them, through parts too, in their units."""
    done, (options, last) = _invoke()
    assert options == Some() and last == "afterwards" and done.exit_code == 0
    given = ["--steps", "3", "--pairs", "5", "--sizes", "2", "--sizes", "3", "--rates", "0.1,0.2", "--wait-ms", "7"]
    _, (options, _) = _invoke(*given, "--bounds", "")
    assert options == Some(3, Model(64, 10, 4), (2, 3), (0.1, 0.2), (), 0.007)
    for name, value in (("--skipped", "3"), ("--heads", "2"), ("--wait-ms", "-1")):
        assert _invoke(name, value)[0].exit_code == 2, name


def test_the_verdict_is_the_exit_code_and_standard_output_is_json() -> None:
    """A bar that is missed is exit code 1; lines of libraries are no part of the JSON, which has no infinity."""
    done, _ = _invoke("--value", "inf")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["passed"], found["value"], found["options"]["model"]["hidden"]) == (False, "inf", 64)


def test_wrong_options_are_refused_together() -> None:
    """Each with its name on the command line, its value and the least one."""
    with pytest.raises(ConfigError, match=r"(?s)--steps: 0 must be at least 1.*--sizes: 0 must be at least 1"):
        Some(steps=0, sizes=(1, 0))
    done, _ = _invoke("--rates", "1;2")
    assert isinstance(done.exception, ConfigError) and "--rates: '1;2' must be numbers" in str(done.exception)


def test_defaults_of_every_benchmark_are_allowed() -> None:
    """Also one that follows from others, and is None."""
    kinds = [one for one in vars(commands).values() if isinstance(one, type) and issubclass(one, Options)]
    assert len(kinds) > 20 and all(isinstance(kind(), Options) for kind in kinds)


def test_plain_values() -> None:
    """Dataclasses, tuples and paths are what JSON has."""
    assert plain({"a": (Model(), Path("b")), 1: math.nan}) == {
        "a": [{"hidden": 32, "layers": 2, "heads": 1}, "b"],
        1: "nan",
    }


def test_every_benchmark_is_there() -> None:
    """The functions that commands name, which are imported only when they are called, with as many parameters."""
    tree = ast.parse(Path(commands.__file__).read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and getattr(one.func, "id", "") == "benchmark"]
    assert len(calls) > 20
    for call in calls:
        target = ast.literal_eval(call.args[1])
        module, _, name = target.partition(":")
        file = Path(commands.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        (found,) = (one for one in ast.parse(file.read_text()).body if getattr(one, "name", "") == name)
        assert isinstance(found, ast.FunctionDef)
        names = [one.arg for one in found.args.args]
        assert len(names) == len(call.args[3:]) + len(call.keywords) + 1 and names[-1] == "on_progress", target
