"""Build DeepSpeed's shared-memory operator on one host; the text is sent there, so nothing is imported from megasdc."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import traceback
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Build the operator unless a stamp says that exactly this one was built here before.

    Args:
        request: ``environment`` (set first), ``python_path`` (list), ``path`` (list, put before PATH), ``folder`` of
            the operator, ``stamp`` (its name in there), ``key`` (versions and tools that the result depends on).

    Returns:
        ``state``: ``ready``, ``built``, ``not needed`` (an accelerator is used) or ``failed``; ``message``: why.
    """
    os.environ.update(request["environment"])
    os.environ["PATH"] = os.pathsep.join([*request["path"], os.environ.get("PATH", os.defpath)])
    sys.path[:0] = request["python_path"]
    folder = pathlib.Path(request["folder"])
    stamp = folder / request["stamp"]
    library = folder / f"{folder.name}.so"
    if stamp.is_file() and library.is_file() and _same(stamp, {**request["key"], "library": library.stat().st_size}):
        return {"state": "ready", "message": ""}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            from deepspeed.accelerator import get_accelerator

            if get_accelerator().device_name() != "cpu":
                return {"state": "not needed", "message": get_accelerator().device_name()}
            from deepspeed.comm.torch import build_shm_op

            if build_shm_op() is None:
                return {"state": "not needed", "message": "DeepSpeed has no such operator for this machine"}
    except Exception as error:  # the host must report and stop, whatever the compiler or the import did
        detail = traceback.format_exception_only(error)[-1].strip()
        return {"state": "failed", "message": f"{detail}\n{said.getvalue()}".strip()}
    stamp.write_text(json.dumps({**request["key"], "library": library.stat().st_size}) + "\n")
    return {"state": "built", "message": ""}


def _same(stamp: pathlib.Path, key: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(stamp.read_text()) == key)
    except ValueError:
        return False
