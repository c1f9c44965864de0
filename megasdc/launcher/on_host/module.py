"""Runs a module of megasdc on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``python -m module argument`` as ranks are run here, and return its ``code``, ``out`` and ``err``.

    Args:
        request: ``module``, ``argument``, ``cwd``, ``python_path`` (list), ``environment``, ``timeout_s``.
    """
    environment = {**os.environ, **request["environment"], "PYTHONPATH": os.pathsep.join(request["python_path"])}
    done = subprocess.run(
        [sys.executable, "-m", request["module"], request["argument"]],
        cwd=request["cwd"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=request["timeout_s"],
        check=False,
    )
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr[-2000:]}
