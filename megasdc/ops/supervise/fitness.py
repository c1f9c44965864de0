"""Whether hosts are fit for a run: the same checks on several of them, each as the launch reaches it.

    python -m megasdc.ops.supervise.fitness REQUEST

``REQUEST`` is JSON: ``checks``, the fields of ``HostChecks``, ``host``, ``slots`` of it, ``run``, ``beside`` and
``overrides`` as of ``HostChecks.check``, and ``result``, a file that gets what makes the host unfit (``unfit``), or why
it gave no answer (``silent``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.common import origin
from megasdc.common.durable import write_durably
from megasdc.common.errors import MegasdcError, StorageError
from megasdc.events import read_events
from megasdc.ops.launch.checks import HostNeeds, HostReport, inspect_hosts
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.plan import launch_needs
from megasdc.ops.launch.remote import HostModule, HostWatch, Transport
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import host_check
from megasdc.ops.supervise.attempt_process import request_of
from megasdc.ops.supervise.diagnosis import HostCheckResult, UnfitHost
from megasdc.ops.supervise.host_check import HostRequest, modules_of

MODULE = "megasdc.ops.supervise.fitness"
START_S, WHOLE_S = 120.0, 1800.0
"""For what a start checks of a host, and where every byte of the data is read."""
TELL_S = 10.0


@dataclass(frozen=True)
class HostChecks:
    """Checks hosts for a run.

    Args:
        request: what is launched, but for its hosts.
        run_dir: of the run.
        prefixes: words before a command that make it run on a host; a host without any is reached over SSH.
    """

    request: LaunchRequest
    run_dir: Path
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(
        self,
        slots: Mapping[str, int],
        run: Mapping[str, int],
        *,
        beside: Collection[str] = (),
        overrides: tuple[str, ...] = (),
        deep: bool = True,
        whole: bool = False,
        watch: HostWatch | None = None,
    ) -> HostCheckResult:
        """Check hosts; nothing is found where the request itself is refused here, or the check is given up.

        Args:
            slots: ranks of each of the hosts; on the first of them rank 0 could listen.
            run: ranks of the hosts of the run.
            beside: other hosts, whose data are right; they are only compared with.
            overrides: settings beside those of the request.
            deep: also what needs megasdc on the host: what it lacks of data, memory and room; for a training that is
                not megasdc's own of modules and shared memory.
            whole: read every byte of the data.
            watch: what is done meanwhile, and whether the check is given up; None: nothing, and it is not.
        """
        watch = watch or HostWatch()
        if not slots:
            return HostCheckResult()
        request = replace(self.request, overrides=(*self.request.overrides, *overrides))
        try:
            needs, transport = launch_needs(request)
        except MegasdcError:
            return HostCheckResult()
        transport = replace(transport, prefixes=self.prefixes)
        placement = Placement({host: [0] for host in (*slots, *beside)}, remote=True)
        several = len(run) > 1
        report = inspect_hosts(placement, transport, needs, trusted=beside, among_others=several, watch=watch)
        silent = {one.hosts[0]: one.text for one in report.found if one.silent and one.hosts[0] in slots}
        unfit = [found for found in _of_report(report) if found.host in slots]
        asked = [host for host in slots if host not in silent]
        if deep:
            common = self._host_request(request, run, whole, needs.python_path)
            lacks, more = _check_hosts({host: slots[host] for host in asked}, transport, needs, common, watch)
            unfit, silent = unfit + lacks, silent | more
        if watch.stops():
            return HostCheckResult(given_up=True)
        bad = {one.host for one in unfit}
        return HostCheckResult(tuple(unfit), tuple(host for host in slots if host not in bad | silent.keys()), silent)

    def _host_request(
        self, request: LaunchRequest, run: Mapping[str, int], whole: bool, python_path: Sequence[str]
    ) -> HostRequest:
        """What is asked of a host, but for its ranks."""
        program = request.program
        try:
            identity = origin.read_identity(self.run_dir)
        except StorageError:  # a start says so
            identity = None
        return HostRequest(
            config=None if request.config_path is None else str(request.config_path),
            overrides=list(request.overrides),
            allow_changed=list(request.allow_changed),
            ranks=sum(run.values()),
            slots=0,
            hosts=len(run),
            run=None if identity is None else identity.run,
            snapshot_bytes=self._snapshot_bytes(),
            whole=whole,
            script=None if program is None else program.name,
            is_module=program is not None and program.is_module,
            modules=[] if program is None else modules_of(program.name, program.is_module, python_path),
        )

    def _snapshot_bytes(self) -> int | None:
        """What snapshots of a rank take, as the last start has measured that found out."""
        if not self.run_dir.is_dir():
            return None
        told = list(read_events(self.run_dir, kind="memory", name="needs", rank=0, broken=[]))
        return told[-1].fields["rank_bytes"] if told else None


def _check_hosts(
    slots: Mapping[str, int], transport: Transport, needs: HostNeeds, common: HostRequest, watch: HostWatch
) -> tuple[list[UnfitHost], dict[str, str]]:
    """What hosts lack, and why others gave no answer."""
    limit_s = WHOLE_S if common.whole else START_S
    environment = {"DS_ACCELERATOR": "cpu"} if needs.cpu_only else {}
    module = HostModule(host_check.MODULE, environment=environment, python_path=needs.python_path, cwd=needs.cwd)
    found, silent = list[UnfitHost](), dict[str, str]()
    for count in dict.fromkeys(slots.values()):
        alike = [host for host, own in slots.items() if own == count]
        asked = asdict(replace(common, slots=count))
        for answer in transport.run(alike, module, asked, timeout_s=limit_s, watch=watch):
            if answer.problem:
                silent[answer.host] = answer.problem
                continue
            lacks = [UnfitHost(**one) for one in answer.value]
            found += [replace(one, host=answer.host, text=f"{answer.host}: {one.text}") for one in lacks]
    return found, silent


def _of_report(report: HostReport) -> list[UnfitHost]:
    return [UnfitHost(host, one.code, one.text) for one in report.found if not one.silent for host in one.hosts]


def report_every(say: Callable[[str], None], every_s: float = TELL_S) -> Callable[[Mapping[str, str]], None]:
    """What tells every few seconds which hosts still work, and how far each is; see ``HostWatch``."""
    told_at = time.monotonic()

    def report(said: Mapping[str, str]) -> None:
        nonlocal told_at
        if said and time.monotonic() - told_at >= every_s:
            told_at = time.monotonic()
            say("hosts are checked: " + ", ".join(f"{host} {text}".rstrip() for host, text in sorted(said.items())))

    return report


def checks_of(raw: Mapping[str, Any]) -> HostChecks:
    """Checks from their fields as JSON has them."""
    prefixes = {host: tuple(words) for host, words in raw["prefixes"].items()}
    return HostChecks(request_of(raw["request"]), Path(raw["run_dir"]), prefixes)


def main() -> int:
    """Check a host as the first argument says; returns 0."""
    said = json.loads(sys.argv[1])
    host, checks = said["host"], checks_of(said["checks"])
    watch = HostWatch(tell=report_every(lambda line: print(line, file=sys.stderr, flush=True)))
    beside, overrides = said["beside"], tuple(said["overrides"])
    slots = {host: said["slots"]}
    checked = checks.check(slots, said["run"], beside=beside, overrides=overrides, whole=True, watch=watch)
    found = [asdict(one) for one in checked.unfit]
    write_durably(Path(said["result"]), json.dumps({"unfit": found, "silent": checked.silent}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
