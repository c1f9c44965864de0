"""How do ranks end when one hangs or is lost, and when there are more of them than devices?"""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.crew import Crew, Job
from gpu.record import Recorder
from gpu.setting import precision
from megasdc.common.errors import HangError

TIMEOUT_S = 8.0


def timeouts(recorder: Recorder, crew: Crew) -> None:
    """A rank that hangs, one that is killed, two NCCL ranks on a device, and one NCCL rank behind a long kernel."""
    bench = Bench(recorder, crew)
    kind = precision("bf16" if recorder.on_gpu else "fp32")
    # Seconds that the other rank has after the first has ended: one that hangs does not end.
    cases = {"hang": ((75,), 2.0), "sigkill": ((79, 75), 20.0)}
    for fault, (codes, within_s) in cases.items():
        with recorder.attempt(fault):
            spec = {"kind": fault, "phase": "backward", "steps": [3, 3], "rank": 1}
            changes = {**kind, "parallel__timeout_s": TIMEOUT_S, "process_faults": [spec]}
            began = time.monotonic()
            ended = crew.run(bench.ranks(bench.config(fault, **changes), 2), 60.0, grace_s=within_s)
            wanted = " or ".join(map(str, codes))
            recorder.check(f"{fault} of one rank: the other ends with {wanted}", ended[0].code in codes, str(ended[0]))
            recorder.note(
                f"{fault}: exit codes, seconds in all", [[one.code for one in ended], round(time.monotonic() - began)]
            )
    if not recorder.on_gpu:
        recorder.not_run("NCCL", "there is no CUDA device")
        return
    with recorder.attempt("more ranks than devices"):
        _too_many(recorder, bench, crew)
    with recorder.attempt("two NCCL ranks on one device"):
        _two_on_one(recorder, bench, crew)
    with recorder.attempt("an NCCL timeout"):
        _one_behind(recorder, bench, crew)


def _too_many(recorder: Recorder, bench: Bench, crew: Crew) -> None:
    import torch

    devices = torch.cuda.device_count()
    config = bench.config("too_many", parallel__share_devices=False, parallel__timeout_s=TIMEOUT_S)
    ended = crew.run(bench.ranks(config, devices + 1), 60.0, grace_s=30.0)
    last = ended[-1]
    ok = last.code == 78 and "share_devices" in str(last.value)
    recorder.check("one rank more than devices: exit code 78 with the way on", ok, str(last))
    recorder.note("one rank more than devices: all exit codes", [one.code for one in ended])


def _two_on_one(recorder: Recorder, bench: Bench, crew: Crew) -> None:
    from megasdc.parallel.local_ranks import LocalMeeting

    meeting = LocalMeeting()
    jobs = [
        Job("gpu.part_timeouts:nccl_pair", {"rank": rank, "folder": str(meeting.folder)}, {"NCCL_DEBUG": "WARN"})
        for rank in (0, 1)
    ]
    ended = crew.run(jobs, 40.0, grace_s=20.0)
    refused = any(one.code not in (0, None) for one in ended)
    recorder.check("NCCL refuses two ranks on one device", refused, "\n".join(map(str, ended)))
    recorder.note("what NCCL says", str(ended[0].value)[:300])


def _one_behind(recorder: Recorder, bench: Bench, crew: Crew) -> None:
    """A collective behind a kernel that lasts beyond the timeout: PyTorch's watchdog aborts the process.

    A rank that is aborted leaves no record, so such a launch ends with 78 and not with 75, and says what that may be.
    """
    for name, environment in {"as it is": {}, "TORCH_NCCL_BLOCKING_WAIT=1": {"TORCH_NCCL_BLOCKING_WAIT": "1"}}.items():
        began = time.monotonic()
        (ended,) = crew.run([Job("gpu.part_timeouts:nccl_behind", {}, environment)], 60.0)
        recorder.note(f"NCCL timeout of 4 s, {name}: exit code, seconds", [ended.code, round(time.monotonic() - began)])
        lines = ended.tail.splitlines()
        said = [line for line in lines if "timeout" in line] or lines[-4:]
        recorder.note(f"NCCL timeout, {name}: says", "\n".join(said)[:1000])
        wanted = HangError.exit_code if environment else -signal.SIGABRT
        recorder.check(f"NCCL timeout, {name}: exit code {wanted}", ended.code == wanted, str(ended))


def nccl_pair(rank: int, folder: str) -> Any:
    """Body of a process: one of two NCCL ranks on the first device."""
    import torch
    import torch.distributed as dist

    from megasdc.parallel.rendezvous import folder_store

    torch.cuda.set_device(0)
    store = folder_store(Path(folder))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=15))
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    return value.tolist()


def nccl_behind() -> Any:
    """Body of a process: a collective that cannot begin within its timeout."""
    import torch
    import torch.distributed as dist

    from megasdc.common.errors import as_known_error

    torch.cuda.set_device(0)
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000_000)  # cycles: about 25 s at 2 GHz
    try:
        dist.all_reduce(value)
        torch.cuda.synchronize()
    except Exception as error:
        known = as_known_error(error)
        print(f"raised in Python: {type(error).__name__}: {str(error)[:300]}", flush=True)
        os._exit(1 if known is None else known.exit_code)
    return value.tolist()
