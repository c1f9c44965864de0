"""Secrets of the environment reach ranks, and are in nothing that a run leaves or shows; those of libraries neither."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_train import folder, tiny_config  # noqa: F401 - a fixture

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

NAMES = (
    *("WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
    *("AZURE_CLIENT_SECRET", "GOOGLE_API_KEY", "MEGASDC_DB_PASSWORD", "MEGASDC_HOOK_TOKEN", "TORCH_HUB_TOKEN"),
    *("DS_REPORT_TOKEN", "DEEPSPEED_API_KEY", "NCCL_NET_PLUGIN_SECRET", "GITHUB_TOKEN", "PYTHON_KEYRING_PASSWORD"),
)
ADDRESSES = ("WANDB_BASE_URL", "MEGASDC_MIRROR", "TORCH_MIRROR", "MLFLOW_TRACKING_URI", "HTTPS_PROXY")
ENVIRONMENT = {name: f"planted{number:02}" for number, name in enumerate(NAMES)}
ENVIRONMENT |= {
    name: f"https://me:planted{number:02}@127.0.0.1/x" for number, name in enumerate(ADDRESSES, start=len(NAMES))
}
HOOK = """
import logging, os, time
from pathlib import Path
from megasdc.optim.hooks import GradientHook

SAYS = ("PUT s3://me:planted24@bucket failed", "GET https://h/a?sig=planted25 failed", "--api-key planted27 is wrong",
        "Authorization: Bearer planted26", "client_secret=planted28", '{"password": "planted29"}')
ASKED, ARCHIVE = %r

class Reports(GradientHook):
    def apply(self, part):
        missing = [name for name in ASKED if not os.environ.get(name)]
        if part.step == 3:
            end = time.monotonic() + 60
            while not list(Path(ARCHIVE).rglob("*.*")) and time.monotonic() < end:
                time.sleep(0.1)  # a process beside the run fills it
            logging.getLogger("megasdc.user").warning("; ".join(SAYS))
            raise RuntimeError(f"missing {missing}; " + "; ".join(SAYS))
"""
PLANTED = [f"planted{number:02}".encode() for number in range(30)]
WORD = re.compile(rb"[\w-]{80,}={0,2}")


def found_in(content: bytes) -> set[bytes]:
    """Secrets in a content, also in encoded words."""
    decoded = []
    for word in WORD.findall(content):
        with contextlib.suppress(ValueError):
            decoded.append(base64.urlsafe_b64decode(word))
    return {secret for secret in PLANTED for text in (content, *decoded) if secret in text}


@contextlib.contextmanager
def watching_command_lines() -> Iterator[dict[bytes, set[bytes]]]:
    """Look at the command lines of all processes while something runs; those with secrets, and what they hold."""
    seen: set[bytes] = set()
    found: dict[bytes, set[bytes]] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_bytes()
                    if line not in seen:
                        seen.add(line)
                        found.update({line: secrets} if (secrets := found_in(line)) else {})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        assert any(b"megasdc.ops.launch" in line for line in seen), "the launcher was seen"


def test_secrets_are_in_nothing_that_a_run_leaves(folder: Path) -> None:  # noqa: F811
    """Files, events, logs, records, archive, console and command lines of a launch that a user's hook ends."""
    hook, raw = folder / "hook.py", tiny_config()
    hook.write_text(HOOK % ((list(ENVIRONMENT), str(folder / "archive")),))
    raw["megasdc"]["data"]["path"] = str(folder / "data")
    raw["megasdc"]["optimizer_hooks"] = [{"hook": "file", "path": str(hook), "name": "Reports"}]
    raw["megasdc"]["checkpoint"] = {"interval": 1, "archive": {"address": str(folder / "archive")}}
    raw["megasdc"]["logging"]["run_dir"] = str(folder / "run")
    (folder / "config.json").write_text(json.dumps(raw))
    command = [sys.executable, "-m", "megasdc", "launch", "--num-gpus", "1", "--config", str(folder / "config.json")]
    with watching_command_lines() as shown:
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 70, done.stderr.decode()  # a hook of the user.s that fails
    assert b"missing []" in done.stderr, "all of them are in the environment of the rank"
    assert not shown
    assert not found_in(done.stdout + done.stderr)
    compiled = Path(importlib.util.cache_from_source(hook))  # Python's own copy of the user's file
    files = [path for path in folder.rglob("*") if path.is_file() and path not in (hook, compiled)]
    names = " ".join(path.name for path in files)
    assert all(name in names for name in ("launch.json", "resolved.json", "megasdc.json", "_states.pt", "rank_00000"))
    assert any(path.is_relative_to(folder / "archive") for path in files)
    leaking = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # a process beside the run has replaced it
            leaking.update({path: secrets} if (secrets := found_in(path.read_bytes())) else {})
    assert not leaking
    (record,) = (folder / "run" / "done").glob("*/rank_00000.json")
    assert "failed; GET https://h/a?... failed" in record.read_text(), "the rest of what was said is there"
