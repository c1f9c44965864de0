"""One rank of a cell: runs the workload, records or verifies it, and reports a line for each run.

Started as ``python -m megasdc.ops.golden.rank REQUEST`` by ``megasdc.ops.golden.watched_ranks``; a cell has as many
ranks as the golden trace, in a world of its own. The request is a JSON file: ``folder`` for reports; ``golden`` file,
or null to record ``config``; ``repeats``; ``minutes`` or null; ``timeout_s``; ``drill`` from ``load_drill`` or null.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasdc.common.imports import frozen_imports

with frozen_imports():
    import torch
    import torch.distributed as dist

    from megasdc.common.addresses import Address
    from megasdc.common.errors import ConfigError, MegasdcError, TraceError, as_known_error
    from megasdc.config.environment import set_deterministic_environment
    from megasdc.config.load import RunConfig, parse_config
    from megasdc.determinism import set_deterministic
    from megasdc.ops.golden.drill import Drill
    from megasdc.parallel import groups
    from megasdc.parallel.dims import ParallelDims
    from megasdc.sdc.golden import compare_run, load_golden, load_header
    from megasdc.sdc.trace import TraceWriter
    from megasdc.tensors.checksum import default_algorithm
    from megasdc.train.detection.golden import Workload, workload_cases
    from megasdc.train.detection.golden_key import compare_key, golden_key, workload_of
    from megasdc.train.logs import set_up_logging
    from megasdc.train.process import prepare_cpu

PULSE_S = 1.0
"""Seconds between signs of life."""
LONGER_S = 600.0
"""Seconds by which collectives' timeouts exceed the watcher's, so that the watcher detects a hang first. A
collective that times out ends its process, with NCCL by a signal, so that a waiting rank would look like a dead one."""


class Reports:
    """Lines of JSON for the watching process; a thread adds signs of life with the progress."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
        self._lock = threading.Lock()
        self.results = 0
        self.last = ""
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        with self._lock:
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")
            self._file.flush()

    def count(self, address: Address, _result: torch.Tensor) -> None:
        """A listener that counts results as progress."""
        self.results += 1
        self.last = str(address)

    def _beat(self) -> None:
        while True:
            self.send("pulse", results=self.results, last=self.last)
            time.sleep(PULSE_S)


def _record(request: dict[str, Any], to: Reports) -> None:
    config = parse_config(request["config"], stored=True)
    set_deterministic_environment(config.megasdc.determinism, os.environ)  # before a device or NCCL is used
    prepare_cpu(config.megasdc.parallel.threads)
    groups.init_process_group(request["timeout_s"] + LONGER_S, share_devices=config.megasdc.parallel.share_devices)
    workload, dims = _build(config, request["timeout_s"])
    to.send("ready")
    name = config.megasdc.trace.algorithm or default_algorithm(workload.engine.device).name
    layout = ParallelDims(dims.tensor, dims.pipeline, dims.data)
    to.send("key", key=golden_key(config, layout, name), algorithm=name, differences={})
    for repeat in range(request["repeats"]):
        for number, case in enumerate(workload_cases(config)):
            trace = workload.trace(case, name, (to.count,), all_steps=True)
            file = (
                Path(request["folder"]) / f"repeat_{repeat:03d}" / f"case_{number:03d}" / f"rank_{dims.rank:05d}.arrow"
            )
            writer = TraceWriter(file, {})
            writer.append(trace)
            writer.close()
            to.send("run", repeat=repeat, case=number, compared=len(trace))


def _verify(request: dict[str, Any], to: Reports) -> None:
    header = load_header(Path(request["golden"]))
    refused = _prepare(header)
    share = bool(header["config"].get("megasdc", {}).get("parallel", {}).get("share_devices"))
    # Before the key, which asks for this rank's device.
    groups.init_process_group(request["timeout_s"] + LONGER_S, share_devices=share)
    key, differences = compare_key(header)  # before the model is built
    differences |= refused
    to.send("key", key=key, algorithm=header["algorithm"], differences=differences)
    if _any_rank(bool(differences)):
        return  # all ranks of a cell stop together: values received from such a rank are not comparable either
    config = workload_of(header)
    workload, dims = _build(config, request["timeout_s"])
    golden = load_golden(Path(request["golden"]), dims.rank)
    to.send("ready")
    drill = None
    if request["drill"] is not None:
        drill = Drill(request["drill"], workload, dims, config.megasdc.model.hidden_size)
    started = time.monotonic()
    repeat = 0
    while _goes_on(repeat, started, request):
        listeners, hooks = ([], []) if drill is None else drill.start(repeat)
        for number, case in enumerate(golden.cases):
            trace = workload.trace(case, golden.algorithm, [*listeners, to.count], hooks)
            finding = compare_run(golden.traces[number, dims.rank], trace, dims).finding
            to.send("run", repeat=repeat, case=number, **asdict(finding))
        repeat += 1
    if drill is not None:
        to.send("drill", changed=drill.changed, acted=drill.acted)


def _prepare(header: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Set environment and threads as the workload needs them; returns obstacles as parts of a key."""
    try:
        config = workload_of(header)
        set_deterministic_environment(config.megasdc.determinism, os.environ)  # before a device or NCCL is used
    except TraceError:
        return {}  # compare_key reports it
    except ConfigError as error:
        return {"environment": ("deterministic", "; ".join(error.problems))}
    prepare_cpu(config.megasdc.parallel.threads)
    return {}


def _build(config: RunConfig, timeout_s: float) -> tuple[Workload, ParallelDims]:
    """Workload and layout, once the process group exists."""
    set_deterministic(config.megasdc.determinism)
    parallel = config.megasdc.parallel
    dims = groups.init_model_parallel(parallel.tensor, parallel.pipeline, timeout_s + LONGER_S)
    workload = Workload(config, dims)
    groups.set_all_timeouts(timeout_s + LONGER_S)
    return workload, dims


def _goes_on(repeat: int, started: float, request: dict[str, Any]) -> bool:
    """Whether another repeat starts; where time decides, as soon as any rank's time is up, none does."""
    if request["minutes"] is None:
        return repeat < int(request["repeats"])
    return repeat == 0 or not _any_rank(time.monotonic() - started >= 60.0 * float(request["minutes"]))


def _any_rank(value: bool) -> bool:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flag = torch.tensor([int(value)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main() -> int:
    """Run as a rank; returns 0 or the exit code of the error."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    reports = Reports(Path(request["folder"]) / f"rank_{rank:05d}.jsonl")
    set_up_logging(rank)
    try:
        (_record if request["golden"] is None else _verify)(request, reports)
        dist.barrier()
        reports.send("done")
        groups.shutdown()
    except Exception as error:
        known = as_known_error(error)
        reports.send("error", text=str(known or error), type=type(known or error).__name__)
        if known is None:
            raise
        print(known, file=sys.stderr)
        return known.exit_code if isinstance(known, MegasdcError) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
