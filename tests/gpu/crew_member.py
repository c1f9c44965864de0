"""One process of a crew: imports what a rank needs, waits for its job at standard input, does it and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from gpu.crew import STACK_SIGNAL


def main() -> int:
    """Import, wait, work; 0, or 1 where the job raised."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    from harness import PRELOAD

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOAD:
            with contextlib.suppress(ImportError):  # what is missing and needed fails in the job, with its name
                importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return 0
    job = json.loads(line)
    os.environ.update(job["environment"])
    module, _, name = job["function"].partition(":")
    try:
        value, code = getattr(importlib.import_module(module), name)(**job["arguments"]), 0
    except BaseException as error:
        traceback.print_exc()
        value, code = f"{type(error).__name__}: {error}"[:2000], 1
    result = Path(job["result"])
    result.with_suffix(".partial").write_text(json.dumps(value), encoding="utf-8")
    result.with_suffix(".partial").replace(result)
    if isinstance(value, dict) and isinstance(value.get("code"), int):
        code = value["code"]
    return code


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, destructors of process groups may wait for ranks that have gone.
    os._exit(ended)
