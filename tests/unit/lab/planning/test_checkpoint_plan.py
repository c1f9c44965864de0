"""Does `megasdc plan-checkpoints` count with what it is given, else what a run measured, and say which is which?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from run_folder import SMOKE, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.events import EventLog
from megasdc.metrics.writer import MetricsWriter

GIVEN = ["--mtbf-hours", 5, "--step-s", 4, "--memory-stall-s", 0.2, "--disk-stall-s", 8, "--verification-steps", 0]

AUDITED = ("megasdc.protect=off", "megasdc.audit.enabled=true", "megasdc.determinism.enabled=true")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan-checkpoints", *map(str, arguments)])


def result(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run with audits that measured steps of 0.5 s and saves that stall it 1, 2 and 9 s and take 30 s."""
    folder = write_run(tmp_path / "run", np.full(5, 3.0), settings=AUDITED)
    writer, events = MetricsWriter(folder), EventLog(folder, 0)
    for step, stall_s in enumerate((1.0, 9.0, 2.0), 6):
        writer.write(step, {"speed/step_s": 0.5})
        writer.write(step, {"checkpoint/save_s": stall_s, "checkpoint/bytes": 3_000_000})
        events.emit("save", "checkpoint", step=step, path="x", duration_s=30.0)
    writer.close()
    events.close()
    return folder


def test_json_holds_everything(tmp_path: Path) -> None:
    """--json and --out are equal, the same in each run, and simulation and formula agree."""
    arguments = [*GIVEN, "--trials", 60]
    found = result(*arguments, "--out", tmp_path / "plan.json")
    assert found == json.loads((tmp_path / "plan.json").read_text()) == result(*arguments)
    best = found["best"]
    assert best["intervals"]["disk"] % best["intervals"]["memory"] == 0
    assert abs(best["simulated"] - best["expected"]) < 4.5 * best["error"]
    assert [tier["name"] for tier in found["tiers"]] == ["memory", "disk"]
    assert found["tiers"][1]["steps"] == best["intervals"]["disk"]
    assert found["job"]["mtbf_s"] == 5 * 3600 and sum(found["job"]["needs"].values()) == pytest.approx(1)
    assert found["origins"]["step_s"] == "--step-s" and found["origins"]["detection_s"] == "assumed"


def test_hosts_and_rates() -> None:
    """Rates add up over hosts, and over the devices of a host where the rate is a published one."""
    given = result("--hosts", 50, "--failures-per-host-hour", 0.001, "--trials", 0)
    assert given["job"]["mtbf_s"] == pytest.approx(20 * 3600)
    published = result("--hosts", 4096, "--devices-per-host", 4, "--trials", 0)
    assert published["job"]["mtbf_s"] == pytest.approx(54 * 86_400 / 419)
    shares = result("--preset", "byterobust", "--mtbf-hours", 9, "--host-share", 0.25, "--trials", 0)["job"]["shares"]
    assert "arXiv 2407.21783" in published["published"] and given["published"].startswith("preset llama3")
    own = result("--mtbf-hours", 9, "--host-share", 0.25, "--older-share", 0, "--trials", 0)
    assert own["published"] == "" and own["origins"]["mtbf_s"] == "--mtbf-hours"
    assert shares == {"host": 0.25, "older": pytest.approx(5948 / 49_212)}


def test_figures_of_a_run(measured: Path) -> None:
    """Medians of what it measured, its audits and its interval; an option comes before them."""
    found = result("--run", measured, "--trials", 0, "--mtbf-hours", 20)
    costs, origins = found["job"]["costs"], found["origins"]
    assert (costs["step_s"], costs["disk_stall_s"], costs["disk_duration_s"]) == (0.5, 2.0, 30.0)
    assert costs["verification_s"] == 50 * 0.5 and "audit" in origins["verification_s"]
    assert "3 saves of the run, of 3.0 MB" in origins["disk_stall_s"] and "speed/step_s" in origins["step_s"]
    assert found["own"]["intervals"]["disk"] == 100
    text = run("--run", measured, "--trials", 0, "--mtbf-hours", 20, "--disk-stall-s", 3, "--step-s", 0.25).stdout
    assert "configured" in text and "--disk-stall-s" in text and "the stall" in text and "speed/step_s" not in text
    bare = result("--run", write_run(measured.parent / "bare", np.full(3, 3.0)), "--trials", 0)
    assert len(bare["notes"]) == 2 and bare["origins"]["disk_stall_s"] == "assumed"


def test_configured_interval(tmp_path: Path) -> None:
    """It is compared; one that saves only at the end is told."""
    assert result(*GIVEN, "--config", SMOKE, "--trials", 0)["own"]["intervals"]["disk"] == 100
    never = json.loads(Path(SMOKE).read_text())
    never["megasdc"]["checkpoint"]["interval"] = 0
    (tmp_path / "never.json").write_text(json.dumps(never))
    found = result(*GIVEN, "--config", tmp_path / "never.json", "--trials", 0)
    assert found["own"] is None and "only at the end" in found["notes"][0]


@pytest.mark.slow
def test_for_people_and_as_a_page(tmp_path: Path, browser: Browser) -> None:
    """Tables name intervals, losses and origins; the page draws both intervals without an error."""
    text = run(*GIVEN, "--trials", 20, "--figure", tmp_path / "plan.html").stdout
    assert "a failure every 5.0 h" in text and "20 jobs" in text and "preset llama3" in text and "Young" in text
    browser.open(tmp_path / "plan.html")
    assert browser.run("document.querySelectorAll('.js-plotly-plot').length") == 2
    assert "only at the end" in run("--mtbf-hours", "inf").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "byterobust"], "no rate"),
        (["--mtbf-hours", 4, "--hosts", 3], "whole job"),
        (["--mtbf-hours", 0.001], "no progress"),
        (["--trials", 1], "at least 2"),
        (["--partners"], "give both"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: list[object], message: str) -> None:
    """Exit code 2, and what is wrong with them."""
    done = run(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", " ").split())


def test_starts_without_torch() -> None:
    """Neither torch nor what brings it along is imported, and a folder that is no run is told in exit code 71."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom megasdc.cli import app\n"
        "done = CliRunner().invoke(app, ['plan-checkpoints', '--run', sys.argv[1]])\n"
        "assert done.exception.exit_code == 71, done.output\n"
        "assert CliRunner().invoke(app, ['plan-checkpoints', '--trials', '9']).exit_code == 0\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "/tmp"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
