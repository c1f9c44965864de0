"""Do figures become PNG and SVG that show them, and CSV that holds them; and what if there is no Chromium?"""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from browser import needs_browser
from run_folder import columns, losses, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.output.figure import Figure, Series, curve
from megasdc.output.html import HEIGHT, SCALE, WIDTH, write_pictures

SVG = "{http://www.w3.org/2000/svg}"


def report(*arguments: object) -> tuple[int, dict[str, object], str]:
    """Exit code, JSON and messages of the real command."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout), result.stderr


@pytest.mark.slow
@needs_browser
def test_every_figure_has_three_files(tmp_path: Path) -> None:
    """PNG of the stated size, SVG with the curve, CSV with all numbers; tables are CSV too."""
    run = write_run(tmp_path / "run", losses(50))
    code, found, _ = report(run, "--figures", tmp_path / "figures")
    assert code == 0
    names = {Path(name).name for name in found["files"]}
    assert names == {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{one}.{form}" for one in found["figures"] for form in ("png", "svg", "csv")} | {"events.csv"}
    for name in found["figures"]:
        png = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">II", png[16:24]) == (WIDTH * SCALE, HEIGHT * SCALE)
        assert len(png) > 10_000, "more than an empty picture"
    loss = ElementTree.parse(tmp_path / "figures" / "loss.svg").getroot()
    assert loss.tag == f"{SVG}svg"
    lines = [one.get("d", "") for one in loss.iter(f"{SVG}path") if one.get("class") == "js-line"]
    assert sorted(line.count(",") for line in lines)[-2:] == [5, 50], "a point each evaluation and step"
    table = columns(tmp_path / "figures" / "loss.csv")
    np.testing.assert_array_equal(np.array(table["training"], dtype=float), losses(50))
    assert [step for step, value in zip(table["step"], table["evaluation"], strict=True) if value] == [
        "10", "20", "30", "40", "50",
    ]  # fmt: skip


@pytest.mark.slow
@needs_browser
def test_a_legend_covers_no_axis(tmp_path: Path) -> None:
    """A legend of many rows begins below the axis and its title, and all of it is in the picture."""
    curves = [
        curve(f"a curve with a long name, {place}", Series(np.arange(9), np.arange(9.0)), "red") for place in range(30)
    ]
    figure = Figure("many", "Many", "", curves, {"height": 300, "showlegend": True}, on_steps=True)
    write_pictures(tmp_path, [figure], (0, 9))
    _, height = struct.unpack(">II", (tmp_path / "many.png").read_bytes()[16:24])
    drawn = ElementTree.parse(tmp_path / "many.svg").getroot()
    title = next(one for one in drawn.iter(f"{SVG}text") if one.get("class") == "xtitle")
    legend = next(one for one in drawn.iter(f"{SVG}g") if one.get("class") == "legend")
    top = float(str(legend.get("transform")).split(",")[1].rstrip(")"))
    assert float(str(title.get("y"))) < top
    names = [one.text for one in legend.iter(f"{SVG}text")]
    assert len(names) == 30
    box = next(one for one in legend.iter(f"{SVG}rect") if one.get("class") == "bg")
    assert top + float(str(box.get("height"))) <= height / SCALE + 1


def test_without_chromium_all_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and the numbers are there, the message says how to get it, and the exit code is 1."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run = write_run(tmp_path / "run", losses(20))
    code, found, said = report(run, "--figures", tmp_path / "figures")
    assert code == 1
    assert "apt-get install chromium" in said
    assert "apt-get install chromium" in found["problem"]
    assert Path(found["page"]).stat().st_size > 1_000_000
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".csv"}


def test_a_chromium_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said last, and its exit code; no picture is left half written."""
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho no room left >&2\nexit 21\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, found, _ = report(write_run(tmp_path / "run", losses(20)), "--figures", tmp_path / "figures")
    assert code == 1
    assert "ended with 21 and without pictures: no room left" in str(found["problem"])
    assert not list((tmp_path / "figures").glob("*.png"))
