"""Does the test of hosts find this one healthy, and a fault in it?"""

from __future__ import annotations

import json

from gpu.crew import Crew
from gpu.part_detection import command
from gpu.record import TAIL_LINES, Recorder


def stress(recorder: Recorder, crew: Crew) -> None:
    """One round of matrix products, collectives and the small run; then a drill."""
    tests = "gemm,training,collectives" if recorder.on_gpu else "collectives,training"
    cases = {"healthy host": ([], 0), "a drill's unhealthy host": (["--drill", "node_4"], 73)}
    for name, (more, code) in cases.items():
        with recorder.attempt(name):
            ended = command(["stress", "--rounds", "1", "--only", tests, "--json", *more], recorder.device)
            said = "\n".join((ended.stderr + ended.stdout).splitlines()[-TAIL_LINES:])
            recorder.check(f"{name}: exit code {code}", ended.returncode == code, f"got {ended.returncode}: {said}")
            if ended.returncode in (0, 73) and not more:
                recorder.note("result", json.loads(ended.stdout).get("machine", "see the exit code"))
