"""One part, in a process of its own: gets ready, waits to be let go, runs.

python -m gpu.part PART FOLDER DEVICE CORES, where PART is a ``Part`` as JSON.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

from gpu.crew import STACK_SIGNAL, Crew
from gpu.parts import Part
from gpu.record import Recorder


def main(text: str, folder: str, device: str, cores: str) -> int:
    """Run it; 0 unless it raised."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    part, own = Part(**json.loads(text)), Path(folder)
    own.mkdir(parents=True, exist_ok=True)
    os.environ.update(part.environment.get(device, {}))
    if device == "cpu":
        os.environ.update({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})
    recorder = Recorder(own / "findings.jsonl", device, own, int(cores))
    module, _, function = part.function.partition(":")
    crew = Crew(own / "processes", device, min(part.ahead, max(2, int(cores))))
    crew.warm()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 0  # whoever started it has gone
    with recorder.attempt("the part runs to its end"):
        getattr(importlib.import_module(module), function)(recorder, crew)
        recorder.check("the part runs to its end", True)
    crew.close()
    return 0


if __name__ == "__main__":
    ended = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
