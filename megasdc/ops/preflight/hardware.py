"""Checks of what hosts compute: against golden values, and of the spares, by ``megasdc stress``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megasdc.common.errors import CorruptionError, LaunchError
from megasdc.ops.preflight.job import Job
from megasdc.ops.preflight.result import Finding, Status, not_done, with_warnings

GOLDEN_TESTS = "gemm,training"
TESTS = "collectives,gemm,training"
LINKS = ",links"
NO_ANSWER, HEALTHY, BY_GOLDEN = "not tested", "healthy", "golden values"
"""Words of a verdict of ``megasdc stress``."""


def check_golden(job: Job) -> Finding:
    """Compare what all hosts compute with golden values."""
    folder = _golden(job)
    if folder is None:
        return not_done(
            "no golden values: `megasdc stress --record --golden FOLDER` on a trusted host, then --golden FOLDER or "
            "megasdc.supervise.golden"
        )
    hosts = {**job.slots, **job.spares}
    found = _stress(job, "golden", hosts, 1, GOLDEN_TESTS, folder)
    if isinstance(found, Finding):
        return found
    tested = [host for host in found["hosts"] if host["status"] != NO_ANSWER]
    without = [host["host"] for host in tested if BY_GOLDEN not in host["rests_on"].values()]
    warnings = [f"no golden values for the devices of {', '.join(without)}"] if without else []
    text = f"{len(tested) - len(without)} of {len(hosts)} hosts compared with {folder}"
    finding = judged(found, job.spares, text, warnings)
    if finding.status is not Status.FAILED and len(without) == len(tested):
        return not_done(f"{text}: it has no values for their devices, `megasdc stress --record` there adds them")
    return finding


def check_spares(job: Job) -> Finding:
    """Test the spares, or all hosts, as they are tested while a run is supervised."""
    hosts = {**job.slots, **job.spares} if job.request.stress_all else job.spares
    if not hosts:
        return not_done(
            "there are no spares: a hostfile of more hosts than megasdc.supervise.num_hosts; --stress-all tests all"
        )
    tests = TESTS + (LINKS if job.request.stress_all and len(hosts) > 1 else "")
    rounds = job.config.megasdc.supervise.test_rounds
    found = _stress(job, "spares", hosts, rounds, tests, _golden(job))
    if isinstance(found, Finding):
        return found
    what = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, {rounds} rounds of {tests.replace(',', ', ')}"
    links = found.get("links")
    slow = [] if links is None or found["exit_code"] == 0 else ["a link is slow or was not measured"]
    return judged(found, job.spares, what, slow)


def _golden(job: Job) -> Path | None:
    named = job.config.megasdc.supervise.golden
    return job.request.golden or (None if named is None else Path(named))


def _stress(
    job: Job, name: str, hosts: dict[str, int], rounds: int, tests: str, golden: Path | None
) -> dict[str, Any] | Finding:
    """The result of a test of hosts; a finding where there is none."""
    port = job.plan.transport.ssh_port
    done = job.commands.run(
        name,
        [
            *("stress", "--json", "--rounds", str(rounds), "--only", tests, *job.hostfile(hosts, name)),
            *(() if golden is None else ("--golden", str(golden))),
            *(() if port is None else ("--ssh-port", str(port))),
        ],
    )
    if done.value is None:
        return Finding(Status.FAILED, done.cause, done.exit_code or LaunchError.exit_code)
    found: dict[str, Any] = done.value
    return found


def judged(found: dict[str, Any], spares: Collection[str], text: str, warnings: list[str]) -> Finding:
    """What follows from a test of hosts; a spare that could not be tested is a warning, since the run can begin.

    Args:
        found: what ``megasdc stress --json`` prints.
        spares: hosts that the run does not begin on.
        text: what was tested.
        warnings: what else is known.
    """
    figures = {"hosts": {host["host"]: host["status"] for host in found["hosts"]}}
    said = {
        host["host"]: f"{host['host']} is {host['status']}: {'; '.join(reason['text'] for reason in host['reasons'])}"
        for host in found["hosts"]
        if host["status"] != HEALTHY
    }
    wrong = [host for host, status in figures["hosts"].items() if status not in (HEALTHY, NO_ANSWER)]
    unknown = [host for host, status in figures["hosts"].items() if status == NO_ANSWER]
    failing = [*wrong, *(host for host in unknown if host not in spares)]
    if failing:
        code = CorruptionError.exit_code if wrong else LaunchError.exit_code
        told = "; ".join([text, *(said[host] for host in failing), "take them out of the hostfile"])
        return Finding(Status.FAILED, told, code, figures)
    return with_warnings(text, [*(said[host] for host in unknown), *warnings], figures)
