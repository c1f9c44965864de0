"""Does `megasdc plan-run` count with what it is given, else what runs measured, and say which is which?"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from run_folder import write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.supervise.journal import FOLDER, Journal

SMALL = ["--devices", 64, "--days", 3, "--trials", 4, "--rate", "host=0.001"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan-run", *map(str, arguments)])


def result(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two attempts, each of which took 12 s to start and 3 s to train; after the first a host was lost."""
    folder = write_run(tmp_path / "run", np.full(5, 3.0), settings=("megasdc.checkpoint.interval=2",))
    writer = MetricsWriter(folder)
    writer.write(6, {"speed/step_s": 0.5, "checkpoint/save_s": 1.0, "checkpoint/bytes": 3_000_000})
    writer.close()
    now = 1000.0
    with monkeypatch.context() as clock, Journal(folder / FOLDER, print) as journal:
        clock.setattr(time, "time", lambda: now)
        clock.setattr(time, "monotonic", lambda: now)
        journal.write("hosts", slots={"a": 1, "b": 1}, num_hosts=1)
        journal.write("opened", config="x")
        for number, resumed, last, kind, action in (
            (1, 0, 3, "host_lost", "replace hosts"),
            (2, 2, 5, "done", "finish"),
        ):
            journal.write("planned", attempt=number, slots={"a": 1}, launch_id="x")
            trained = {"resumed": resumed, "began_at": now + 12, "last": last, "last_at": now + 15}
            now += 45 if number == 1 else 16
            said = {"kind": kind, "hosts": ["a"], "step": last, "text": "", "incident": None}
            journal.write("ended", exit_code=0, diagnosis=said, trained=trained)
            journal.write("decided", action=action, text="", replaced=["a"] if number == 1 else [], pause_s=0.0)
            now += 2
        journal.write("finished", exit_code=0, text="")
    return folder


@pytest.mark.slow
def test_json_holds_everything(tmp_path: Path) -> None:
    """--json and --out are equal, the same in each run, and the parts of the time add up."""
    arguments = [*SMALL, "--memory-stall-s", 0.2, "--partners"]
    found = result(*arguments, "--out", tmp_path / "plan.json")
    assert found == json.loads((tmp_path / "plan.json").read_text()) == result(*arguments)
    assert sum(found["parts"].values()) == pytest.approx(1) and found["parts"]["training"] == found["training"]
    assert found["fleet"]["devices"] == 64 and found["fleet"]["hosts"] == 8
    assert found["low"] < found["training"] < found["high"] <= 1
    assert abs(found["training"] - found["expected"]) < 0.05
    assert found["origins"]["rate host"] == "--rate" and found["origins"]["rate network"] == "preset llama3"
    assert found["fleet"]["spares"] == found["spares"]["needed"] and "--waiting" in found["origins"]["spares"]


def test_published_rates() -> None:
    """Those of Llama 3 by cause, and of all its devices one failure in 54 days over 419."""
    causes = {one["name"]: one["per_device_hour"] for one in result("--days", 1, "--trials", 2)["fleet"]["causes"]}
    hours = 16_384 * 54 * 24
    counts = {"host": 312, "network": 35, "software": 56, "hang": 7, "storage": 3, "corruption": 6}
    assert causes == pytest.approx({name: count / hours for name, count in counts.items()})
    assert sum(causes.values()) * hours == pytest.approx(419)


def test_figures_of_a_run(supervised: Path) -> None:
    """What it measured is counted with, and its productive share predicted; an option comes before it."""
    found = result(*SMALL, "--run", supervised)
    assert [one["failures"] for one in found["predictions"]] == [{"host": 1}]
    predicted, measured = found["predictions"][0]["shares"]
    assert measured == pytest.approx((2 + 3) / (45 + 2 + 16 + 2)) and predicted == pytest.approx(measured, abs=0.03)
    costs, origins = found["fleet"]["costs"], found["origins"]
    assert (costs["step_s"], costs["disk_stall_s"], costs["restart_disk_s"]) == (0.5, 1.0, pytest.approx(12.0))
    assert found["fleet"]["deciding_s"] == pytest.approx(2.0)
    detection = {one["name"]: one["detection_s"] for one in found["fleet"]["causes"]}
    assert detection["host"] == pytest.approx(30.0) and origins["detection host"] == "mean of the runs"
    assert detection["hang"] == 120.0 and origins["detection hang"] == "assumed"
    assert origins["restart_disk_s"] == "mean of 2 starts of the runs" and origins["deciding_s"].startswith("mean of 1")
    given = result(*SMALL, "--run", supervised, "--detection", "host=7", "--step-s", 2, "--spares", 3)
    assert given["fleet"]["costs"]["step_s"] == 2 and given["origins"]["detection host"] == "--detection"
    assert given["fleet"]["causes"][0]["detection_s"] == 7 and given["fleet"]["spares"] == 3


@pytest.mark.slow
def test_for_people_and_as_a_page(tmp_path: Path, supervised: Path, browser: Browser) -> None:
    """Sentences and tables name shares, spares, what is never found and origins; the page draws without an error."""
    done = run(*SMALL, "--run", supervised, "--figure", tmp_path / "plan.html")
    text = " ".join(done.stdout.split())
    for part in ("64 devices, 8 hosts, 3 days", "what buys most", "spares:", "that nothing finds", "preset llama3"):
        assert part in text, part
    assert "productive share of supervised runs" in text and "its own" in text
    browser.open(tmp_path / "plan.html")
    assert browser.run("document.querySelectorAll('.js-plotly-plot').length") == 3 and browser.errors == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "gremlins=1"], "none of the causes host, network"),
        (["--rate", "host"], "needed CAUSE=NUMBER"),
        (["--rate", "host=-1"], "per_device_hour of host is -1"),
        (["--replaced", "hang=2"], "needed a share from 0 to 1"),
        (["--preset", "byterobust"], "no rate"),
        (["--days", 0], "--days: got 0"),
        (["--memory-steps", 4], "--memory-stall-s too"),
        (["--memory-steps", 4, "--memory-stall-s", 0.1], "give both, or neither"),
        (["--memory-steps", 4, "--memory-stall-s", 0.1, "--disk-steps", 6], "multiple of --memory-steps"),
        (["--partners"], "give both"),
        (["--devices", 100_000_000], "no progress"),
        (["--trials", 1], "2"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: list[object], message: str) -> None:
    """Exit code 2, and what is wrong with them."""
    done = run(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_starts_without_torch(supervised: Path) -> None:
    """Neither torch nor what brings it along is imported; a run that was not supervised is told in exit code 71."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom megasdc.cli import app\n"
        "done = CliRunner().invoke(app, ['plan-run', '--run', '/tmp'])\n"
        "assert done.exception.exit_code == 71, done.output\n"
        "done = CliRunner().invoke(app, ['plan-run', '--days', '1', '--trials', '2', '--run', sys.argv[1]])\n"
        "assert done.exit_code == 0, done.output\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(supervised)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
