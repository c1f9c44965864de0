"""The checks that compare a device with itself and with fp64, on this device: silent on a healthy one, at what cost?"""

from __future__ import annotations

from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew
from gpu.part_detection import check_faults, verdicts
from gpu.record import Recorder
from gpu.setting import precision
from megasdc.events import read_events

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
FAULTS = {
    "update": {**WRONG, "submodule": "*.linear_fc1", "phase": "update", "rank": 1, "steps": [2, 2]},
    "state": {**WRONG, "submodule": "*.linear_fc2", "phase": "optimizer_state", "rank": 2, "steps": [4, 4]},
}


def exact(recorder: Recorder, crew: Crew) -> None:
    """Slices, sums of rows and permuted audits of three replicas: no bit changes, no alarm; faults are found."""
    bench = Bench(recorder, crew)
    for kind, faults in {"bf16": FAULTS, "fp32": {}}.items() if recorder.on_gpu else [("fp32", FAULTS)]:
        with recorder.attempt(f"exact checks, {kind}"):
            common = {**STEADY, **precision(kind)}
            bench.train({f"{kind} plain": bench.ranks(bench.config(f"{kind}_plain", **common, **AUDITED), 3)})
            check_faults(recorder, bench, f"{kind} ", {**common, **CHECKS}, faults)
            ends = [bench.folder / f"{kind}_{name}" / "checkpoints" / "step_00000006" for name in ("plain", "clean")]
            bench.compare({f"{kind}: checks change no bit": (ends[0], ends[1])})
            tried = [one.fields for one in read_events(bench.folder / f"{kind}_clean", kind="audit", name="permuted")]
            recorder.note(f"{kind}: what was computed with its elements in other places", tried[:1])


LINKS: dict[str, tuple[dict[str, Any], tuple[int, str, int], int]] = {
    "norm": ({"phase": "norm", "slot": "total", "rank": 1, "steps": [3, 3]}, (3, "norm", 1), 73),
    "part of the norm": ({"phase": "norm", "slot": "part", "rank": 1, "steps": [3, 3]}, (3, "norm", 1), 73),
    "factor": ({"phase": "norm", "slot": "factor", "rank": 1, "steps": [3, 3]}, (3, "clipping", 1), 73),
    "state at rest": (
        {
            "phase": "state_at_rest",
            "submodule": "*.linear_fc1",
            "slot": "weight.exp_avg_sq",
            "rank": 2,
            "steps": [2, 2],
        },
        (3, "state", 2),
        73,
    ),
    "copy": (
        {"phase": "copy", "submodule": "*.linear_fc2", "slot": "*", "rank": 1, "steps": [2, 2]},
        (3, "copy", 1),
        0,
    ),
    "tokens": ({"phase": "tokens", "rank": 1, "micro_batches": [1], "bits": [0], "steps": [4, 4]}, (4, "tokens", 1), 0),
}
"""One fault of one rank in each link from the data to the parameters: where it is named, and the exit code."""


def chain(recorder: Recorder, crew: Crew) -> None:
    """Three replicas with a fault in one link: it is named, and put right or the run ends with 73."""
    bench = Bench(recorder, crew)
    kind = precision("bf16" if recorder.on_gpu else "fp32")
    common = {**STEADY, **kind, "ds__gradient_clipping": 0.5, "sdc__always_on": {"enabled": True, "coverage": "all"}}
    jobs = {}
    for name, (fault, _, _) in LINKS.items():
        scaled = {} if "bits" in fault else {"kind": "scale", "factor": 1.02}
        jobs[name] = bench.ranks(
            bench.config(name.replace(" ", "_"), **common, faults=[{**fault, **scaled, "once": True}]), 3
        )
    jobs["clean"] = bench.ranks(bench.config("clean", **common), 3)
    ended = bench.crew.run_worlds(jobs, 120.0, bench.side)
    for name, (_, wanted, code) in LINKS.items():
        found = [(one["step"], one["tier"], one["rank"]) for one in verdicts(bench.folder / name.replace(" ", "_"))]
        recorder.check(f"{name}: names the rank, and nobody else", found == [wanted], str(found))
        codes = {one.code for one in ended[name]}
        recorder.check(f"{name}: exit code {code}", codes == {code}, "\n".join(map(str, ended[name])))
    found = verdicts(bench.folder / "clean")
    recorder.check("clean run: no verdict", {one.code for one in ended["clean"]} == {0} and not found, str(found))
    put_right = [name for name, (_, _, code) in LINKS.items() if code == 0]
    last = "checkpoints/step_00000006"
    bench.compare(
        {
            f"{name}: put right, to the bit": (bench.folder / "clean" / last, bench.folder / name / last)
            for name in put_right
        }
    )
