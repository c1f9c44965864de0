"""A stand-in for the training script: meets the other ranks, behaves as told, and leaves its records.

``MEGASDC_TEST_BEHAVIOUR`` is ``sum`` (one all-reduce over gloo), ``signed`` (after ranks with a secret have met),
``sums`` (one after the other until a peer is lost, which is a PeerError), ``fail:RANK`` (that rank ends with a
DataError, the others as PeerError), ``alone:RANK`` (that rank ends so, the others hear nothing of it and sleep),
``sleep`` (until a signal), ``save:S`` (the same, then for S seconds more), ``meet:RANK`` (wait for the others as
training does, but that rank never comes), ``deaf`` (to every signal that asks), or ``environment`` (write the
environment to the run folder).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from megasdc.common.errors import DataError, MegasdcError, PeerError
from megasdc.config.load import load_config
from megasdc.ops.launch.records import write_done, write_started

RANK = int(os.environ["RANK"])
FAILURE_S = 1.0


def main(run_dir: Path) -> None:
    """Do what the environment asks for."""
    behaviour, _, argument = os.environ["MEGASDC_TEST_BEHAVIOUR"].partition(":")
    if behaviour in ("sum", "signed"):
        check_sum(is_signed=behaviour == "signed")
    elif behaviour == "sums":
        sum_until_peer_lost(run_dir)
    elif behaviour in ("fail", "alone"):
        time.sleep(FAILURE_S)
        if int(argument) == RANK:
            raise DataError(f"shard {RANK} is damaged\nsecond line")
        if behaviour == "alone":
            sleep_until_signal(run_dir)
            return
        time.sleep(FAILURE_S)
        raise PeerError("another rank has gone")
    elif behaviour in ("sleep", "save"):
        sleep_until_signal(run_dir)
        time.sleep(float(argument or 0))
    elif behaviour == "meet":
        meet_others(run_dir, int(argument) == RANK)
    elif behaviour == "deaf":
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        (run_dir / f"asleep_{RANK}").touch()
        time.sleep(3600)
    elif behaviour == "environment":
        found = {"argv": sys.argv[1:], "cwd": str(Path.cwd()), "environ": dict(os.environ)}
        (run_dir / f"environment_{RANK}.json").write_text(json.dumps(found))


def check_sum(*, is_signed: bool) -> None:
    """Meet as training does, sum the ranks and compare with the formula; ``is_signed``: by a secret, at one address."""
    import torch
    import torch.distributed as dist

    from megasdc.parallel.rendezvous import Identity, meet

    size = int(os.environ["WORLD_SIZE"])
    store = meet(Identity.own(RANK, size, None), 60.0)  # kept: torch keeps only a part of it
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=size)
    total = torch.tensor([float(RANK)])
    dist.all_reduce(total)
    assert total.item() == size * (size - 1) / 2, total
    if is_signed:
        check_secret()
    dist.destroy_process_group()


def check_secret() -> None:
    """All ranks have the same, which their environment has not, and the store listens at the master's address alone."""
    from megasdc.parallel.collectives import gather_objects
    from megasdc.parallel.rendezvous import launch_secret

    secrets, port = gather_objects(launch_secret()), f":{int(os.environ['MASTER_PORT']):04X}"
    assert len(set(secrets)) == 1 and secrets[0] and secrets[0].hex() not in str(os.environ)
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    found = [line.split()[1] for table in tables for line in table if " 0A " in line and f"{port} " in line]
    assert found == ([address_in_proc(os.environ["MASTER_ADDR"]) + port] if RANK == 0 else []), found


def address_in_proc(address: str) -> str:
    """An IPv4 address as /proc/net/tcp has it."""
    return bytes(reversed([int(part) for part in address.split(".")])).hex().upper()


def sum_until_peer_lost(run_dir: Path) -> None:
    """Go on summing, as training would."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    (run_dir / f"summing_{RANK}").touch()
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
    except RuntimeError as error:
        raise PeerError(f"a collective failed: {error}") from error


def meet_others(run_dir: Path, absent: bool) -> None:
    """Wait for all ranks, of which one never comes."""
    from megasdc.parallel import groups
    from megasdc.train.signals import StopSignals

    def leave(code: int, error: BaseException | None) -> None:
        write_done(run_dir, RANK, code, error, end=None if code else "stopped before its first step")
        os._exit(code)

    signals = StopSignals(leave)
    (run_dir / f"meeting_{RANK}").touch()
    if absent:
        time.sleep(3600)
    assert signals.start is not None
    groups.init_process_group(600.0, on_met=signals.start.met)


def sleep_until_signal(run_dir: Path) -> None:
    """Wait; the first SIGTERM or SIGUSR1 ends the wait as if a checkpoint had been saved."""
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    (run_dir / f"asleep_{RANK}").touch()
    while not stopped:
        time.sleep(0.05)


if __name__ == "__main__":
    arguments = sys.argv[sys.argv.index("--config") + 1 :]
    folder = Path(load_config(arguments[0], arguments[2::2]).megasdc.logging.run_dir)
    write_started(folder, RANK)
    code, cause = 0, None
    try:
        main(folder)
    except MegasdcError as error:
        code, cause = error.exit_code, error
    write_done(folder, RANK, code, cause, end=None if code else "all steps done")
    sys.exit(code)
