"""Machine, date and versions of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ("--out", "--log", "--figure")
"""Options of a benchmark that name files alone, and so say nothing about what it measures."""
PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers")


def describe_machine() -> dict[str, Any]:
    """Command, commit, date (UTC), processor, cores this process may use, load before the measurement, and versions."""
    return {
        "command": _command(sys.argv[1:]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _command(arguments: list[str]) -> str:
    """The benchmark as it can be given again, without the files that it writes."""
    kept, skipped = list[str](), False
    for one in arguments:
        if not skipped and not one.startswith(FILES):
            kept.append(one)
        skipped = not skipped and one in FILES
    return shlex.join(["python", "-m", "tools.bench", *kept])


def _commit() -> str:
    """Commit of this checkout, with ``+`` where a file of it was changed; ``unknown`` where there is none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    """The processor's name and family, as far as Linux reports them."""
    found: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in found:
        name += f" (family {found['cpu family']} model {found.get('model', '?')})"
    return name
