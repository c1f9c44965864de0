"""Does one word protect a training with DeepSpeed alone on this device, and change no bit of it?"""

from __future__ import annotations

from gpu.bench import LIMIT_S, Bench
from gpu.crew import Crew
from gpu.record import Recorder

CASES = {"without": (None, False), "clean": ("standard", False), "broken": ("standard", True)}
"""Word, and whether a unit of the device is wrong."""


def guard(recorder: Recorder, crew: Crew) -> None:
    """One replica, audited by computing with elements in other places: the same bits; a broken unit is named."""
    bench = Bench(recorder, crew)
    for kind in ("bf16", "fp32") if recorder.on_gpu else ("fp32",):
        with recorder.attempt(f"guard, {kind}"):
            worlds = {}
            for name, (word, broken) in CASES.items():
                folder = str(bench.folder / f"{kind}_{name}")
                arguments = {"folder": folder, "word": word, "bf16": kind == "bf16", "broken": broken}
                worlds[name] = bench.world("gpu.jobs:train_guarded", 1, arguments)
            outcomes = bench.train(worlds, LIMIT_S)
            without, clean, broken = (outcomes[name][0].value for name in CASES)
            same = clean["digest"] == without["digest"]
            recorder.check(f"{kind}: the word changes no bit", same, f"{without} and {clean}")
            told = f"{clean['audits']} audits, exit code {clean['exit']}, incidents {clean['named']}"
            recorder.check(f"{kind}: clean, audits agree", clean["audits"] > 2 and not clean["named"], told)
            named = broken["exit"] == 73 and [ranks for _, ranks in broken["named"]] == [[0]]
            recorder.check(f"{kind}: a broken unit is named, exit code 73", named, str(broken))
            recorder.note(f"{kind}: what was computed with its elements in other places", clean["moved"])
