"""Make the pictures of README, of real runs between three test hosts on this machine.

    python -m tools.pictures [--out docs/images]

Two hosts with two ranks each train a tiny GPT; one rank is slow from the first step on, another computes wrong values
from step 30 on, which an audit finds. ``top.svg`` is the live view shortly before, ``incident.png`` the page that the
run leaves. Then a supervised run loses a host: what the supervisor says is printed. Needs what test hosts need
(``megasdc/ops/cluster.py``), Chromium, and two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from megasdc.common.errors import DataError
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.top.screen import Screen
from megasdc.ops.top.view import RunWatcher

OUT = Path(__file__).resolve().parents[1] / "docs" / "images"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
RUN = Path("runs/my")
SEEN_FROM, WRONG_FROM, LOST_AT = 24, 30, 18
WIDTH, PAGE = 96, (1000, 760)
LIMIT_S = 180.0
CORRUPT = 73
"""Exit code of a run that found corruption."""

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "megasdc": {
        "model": {"preset": "gpt2-1m", "num_layers": 2, "hidden_size": 64},
        "data": {
            "path": "prepared/my",
            "sequence_length": 64,
            "split": [8, 1, 1],
            "sources": [{"kind": "stdlib", "pattern": "asyncio/*.py"}],
            "tokenizer": {"kind": "sentencepiece", "vocab_size": 500, "train_characters": 200000},
        },
        "training": {"steps": 60},
        "checkpoint": {"interval": 10},
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "interval": 15, "micro_batch": "extra"},
        "logging": {"run_dir": str(RUN), "interval": 1},
        "delay": [
            {"kind": "normal", "mean_s": 0.05, "std_s": 0.005},
            {"kind": "slow_rank", "replica": 2, "delay_s": 0.1},
        ],
        "faults": [
            {
                "submodule": "3.layer.mlp.linear_fc1",
                "rank": 1,
                "steps": [WRONG_FROM, None],
                "bits": "exponent",
                "same_elements": True,
            }
        ],
    },
}


LOSES_A_HOST: dict[str, Any] = {
    "checkpoint": {"interval": 0, "memory": {"interval": 2, "partners": True}},
    "supervise": {"num_hosts": 2, "pause_s": 1.0, "spare_test_s": 0},
    "logging": {"run_dir": str(RUN), "interval": 6},
    "audit": {},
    "delay": [{"kind": "normal", "mean_s": 0.05, "std_s": 0.005}],
    "faults": [],
}
"""Sections of the run that loses a host; the others are as in ``CONFIG``."""
MEGASDC = (sys.executable, "-m", "megasdc")


def main() -> None:
    """Train, look, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures; default: docs/images")
    out = parser.parse_args().out.absolute()
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        parser.error(f"none of {', '.join(CHROMIUM)} is installed; the page of the incident is drawn by it")
    if reason := unavailable_reason():
        parser.error(f"there can be no test hosts: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="megasdc_pictures_") as folder:
        os.chdir(folder)  # so that pages name files as those of a user's own folder
        write_config({})
        subprocess.run([*MEGASDC, "prepare-data", "--config", "my.json"], check=True, capture_output=True)
        env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        with Cluster(Path(folder) / "cluster", 3, env=env) as hosts:
            draw_top(hosts, out / "top.svg")
            draw_incident(out / "incident.png", str(browser))
            shutil.rmtree(RUN)
            print(lose_a_host(hosts))


def write_config(sections: dict[str, Any]) -> None:
    """Write ``my.json`` with other sections."""
    Path("my.json").write_text(json.dumps({**CONFIG, "megasdc": {**CONFIG["megasdc"], **sections}}))


def start(hosts: Cluster, command: str, names: list[str]) -> subprocess.Popen[str]:
    """Start a command on the first host that launches on some; what it says is in the file ``log``."""
    words = [*MEGASDC, command, "--hostfile", str(hosts.hostfile(names, slots=2)), "--config", "my.json"]
    with open("log", "w") as log:
        return hosts.popen("node1", words, cwd=os.getcwd(), stdout=log, stderr=log)


def draw_top(hosts: Cluster, picture: Path) -> None:
    """Train until the wrong rank is found; draw the live view shortly before.

    Raises:
        SystemExit: the run ended otherwise, with what it said.
    """
    launch = start(hosts, "launch", ["node1", "node2"])
    try:
        wait_for_step(SEEN_FROM, launch)
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=WIDTH, file=nowhere)
            console.print(Screen(RunWatcher(RUN).read()))
            drawn = console.export_svg(title=f"megasdc top {RUN}")
        picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # fonts of the network
        expect_code(launch, CORRUPT)
    finally:
        launch.kill()


def lose_a_host(hosts: Cluster) -> str:
    """Power a host off that a supervised run trains on; what the supervisor says until the end.

    Raises:
        SystemExit: the run ended otherwise, with what it said.
    """
    write_config(LOSES_A_HOST)
    supervisor = start(hosts, "supervise", ["node1", "node2", "node3"])
    try:
        wait_for_step(LOST_AT, supervisor)
        hosts.power_off("node2")
        expect_code(supervisor, 0)
    finally:
        supervisor.kill()
    lines = Path("log").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("megasdc supervise:") or " step " in line)


def expect_code(process: subprocess.Popen[str], code: int) -> None:
    """Wait for the end of a run, and end with what it said where its exit code is another."""
    if process.wait(LIMIT_S) != code:
        sys.exit(f"the run ended with exit code {process.returncode}, not {code}:\n{Path('log').read_text()}")


def wait_for_step(step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has taken so many steps."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(DataError):
            if RunWatcher(RUN).read().step >= step:
                return
        time.sleep(0.1)
    sys.exit(f"the run has not taken {step} steps in time, or has ended:\n{Path('log').read_text()}")


def draw_incident(picture: Path, browser: str) -> None:
    """Draw the top of the page that the run has left."""
    (page,) = (RUN / "reports").glob("incident_*.html")
    size = ",".join(map(str, PAGE))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
    words = [browser, *options, f"--screenshot={picture}", page.absolute().as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)


if __name__ == "__main__":
    main()
