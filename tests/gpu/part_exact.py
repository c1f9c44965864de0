"""The checks that compare a device with itself and with fp64, on this device: silent on a healthy one, at what cost?"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_detection import verdicts
from gpu.record import Recorder
from gpu.setting import LLAMA, metrics, precision

WHOLE = 1 << 26
"""Elements of a slice, more than a shard has."""
CHECKS = {
    "sdc__always_on": {"enabled": True, "coverage": "all", "slice_elements": WHOLE, "rows": True},
    "audit": {"enabled": True, "interval": 2, "permuted": True},
}
AUDITED = {"audit": {"enabled": True, "interval": 2}}
"""Audits alone, which deal samples in another way."""
STEADY = {
    "determinism__enabled": True,
    "ds__pipeline__activation_checkpoint_interval": 1,
    "ds__train_batch_size": 6,
    "checkpoint__interval": 6,
}
WRONG = {"kind": "scale", "factor": 1.5, "slot": "weight*", "once": True}
# Weights, which decay, are in the slices of even steps.
FAULTS = [
    {**WRONG, "submodule": "*.linear_fc1", "phase": "update", "rank": 1, "steps": [2, 2]},
    {**WRONG, "submodule": "*.linear_fc2", "phase": "optimizer_state", "rank": 2, "steps": [4, 4]},
]


def exact(recorder: Recorder, crew: Crew) -> None:
    """Slices, sums of rows and permuted audits of three replicas: no bit changes, no alarm; faults are found."""
    bench = Bench(recorder, crew)
    for kind in ("fp32", "bf16") if recorder.on_gpu else ("fp32",):
        with recorder.attempt(f"exact checks, {kind}"):
            _exact(recorder, bench, kind)


def _exact(recorder: Recorder, bench: Bench, kind: str) -> None:
    cases: dict[str, dict[str, Any]] = {"plain": AUDITED, "clean": CHECKS, "harmed": {**CHECKS, "faults": FAULTS}}
    folders = {name: bench.folder / f"{name}_{kind}" for name in cases}
    bench.train(
        {
            f"{name} {kind}": bench.ranks(bench.config(f"{name}_{kind}", **{**STEADY, **precision(kind), **more}), 3)
            for name, more in cases.items()
        }
    )
    found = verdicts(folders["clean"])
    recorder.check(f"{kind}: no verdict in a clean run", len(metrics(folders["clean"])) == 6 and not found, str(found))
    named = {(one["step"], one["tier"], one["rank"]) for one in verdicts(folders["harmed"])}
    expected = {(2, "update", 1), (4, "state", 2)}
    recorder.check(f"{kind}: an update and a state are found, and nobody else", named == expected, str(named))
    ends = {name: folder / "checkpoints" / "step_00000006" for name, folder in folders.items()}
    pairs = {f"{kind}: checks change no bit": ("plain", "clean"), f"{kind}: put right": ("clean", "harmed")}
    bench.compare({name: (ends[one], ends[other]) for name, (one, other) in pairs.items()})


def referee(recorder: Recorder, crew: Crew) -> None:
    """Results of this device's libraries are within the bounds of the referee, and flips of bits are outside."""
    from tools.bench.detection.options import RefereeOptions
    from tools.bench.detection.referee import ask_referee

    elements = 8_000 if recorder.on_gpu else 500
    options = RefereeOptions(elements=elements, flips=4, width=512 if recorder.on_gpu else 64, device=recorder.device)
    rows: Iterator[Any] = ask_referee(options)
    while True:
        with recorder.attempt("the referee"):
            answer = next(rows, None)
            if answer is None:
                return
            label = f"{answer.kind}, {answer.type}"
            said = f"{answer.accused} of {answer.compared}, nearest {answer.nearest:.2f}"
            recorder.check(f"{label}: no healthy element is accused", not answer.accused, said)
            seen, of = (sum(column) for column in zip(*answer.seen, strict=True))
            recorder.note(label, {"apart": answer.apart, "nearest": round(answer.nearest, 3), "seen": f"{seen}/{of}"})


SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "max_positions": 1024},
    "cpu": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 32},
}
STEPS = {"cuda": 60, "cpu": 12}
WARM_UP = 10
"""First steps that are not counted."""
KEPT = {
    "sdc__always_on": {"enabled": True, "slice_elements": 1 << 16, "rows": True},
    "audit": {"enabled": True, "permuted": True},
}
COSTS: dict[str, dict[str, Any]] = {
    "no checks": {},
    "kept within the budget": KEPT,
    "every result of every step": {"sdc__always_on": {**KEPT["sdc__always_on"], "coverage": "all"}},
}


def cost(recorder: Recorder, crew: Crew) -> None:
    """Steps of one rank with and without checks, in processes that take turns; nothing else runs on the device."""
    bench = Bench(recorder, crew)
    sizes, steps = SIZES[recorder.device], STEPS[recorder.device]
    common: dict[str, Any] = {
        **(precision("bf16") if recorder.on_gpu else {}),
        "determinism__enabled": True,
        "model": {**LLAMA, **sizes},
        "data__sequence_length": sizes["max_positions"],
        "training__steps": steps,
        "ds__pipeline__activation_checkpoint_interval": 1,
        "ds__train_micro_batch_size_per_gpu": 4,
        "ds__train_batch_size": 16,
    }
    taken: dict[str, list[float]] = {name: [] for name in COSTS}
    for turn in range(2):
        for name, checks in COSTS.items():
            label = f"{name.replace(' ', '_')}_{turn}"
            (ended,) = crew.run(bench.ranks(bench.config(label, **common, **checks), 1), 100.0)
            crew.warm()
            if recorder.check(f"{name} trains, turn {turn + 1}", ended.code == 0, str(ended)):
                seconds = metrics(bench.folder / label, "speed/step_s")[WARM_UP:]
                taken[name].append(1000 * median(seconds))
                found = verdicts(bench.folder / label)
                recorder.check(f"{name}: no verdict, turn {turn + 1}", not found, str(found))
    for name, times in taken.items():
        recorder.note(f"{name}: ms a step, by turn", [round(one, 2) for one in times])
    if all(taken.values()):
        least = min(taken["no checks"])
        recorder.note(
            "share of a step, best of the turns, %",
            {name: round(100 * (min(times) / least - 1), 2) for name, times in taken.items()},
        )
