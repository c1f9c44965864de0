"""Run the tests that are marked ``full`` in slices, the oldest first, and note which slice ran on which commit.

    python -m tools.nightly [--minutes 80] [--workers 2] [--only TEXT] [--list]

``tests/nightly.sh`` installs what they need and calls it. A slice is a file of tests, or ``MOST`` of a longer one's
tests. ``tests/nightly.json`` keeps for each slice when it last ran, on which commit, how long, and what failed. A slice
is begun only where the time is left that it took before, and is ended when the time is over: its tests that had not
ended are noted, and it is the first one the next time. Exit code 1 if a test failed, 2 if none could be collected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "nightly.json"
MOST = 100
"""Tests of a slice."""
UNKNOWN_S = 600.0
"""Seconds that a slice is expected to take that never ran."""
AT_LEAST_S = 60.0
"""Seconds that a slice has at least, since importing takes some."""
_ENDED = re.compile(r"(?:(\S+::.*) )?(PASSED|FAILED|ERROR|SKIPPED)(?: +\[ *\d+%\]| (\S+::.*)| |$)")
"""What pytest prints of a test that has ended: its id before the word, or behind it where there are workers."""


@dataclass(frozen=True)
class Ran:
    """The last time that a slice ran.

    Args:
        commit: with ``+`` where a file was changed.
        date: UTC, ISO 8601.
        seconds: that it took.
        passed: tests; those that were skipped are none.
        failed: tests that failed, by their ids.
        skipped: tests that could not run there, with the reason.
        unfinished: tests that had not ended when the time was over.
    """

    commit: str
    date: str
    seconds: float
    passed: int
    failed: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()


def slices_of(ids: Sequence[str]) -> dict[str, list[str]]:
    """Tests by slice: a file's path, with the number of the part where a file has several."""
    files: dict[str, list[str]] = {}
    for one in ids:
        files.setdefault(one.partition("::")[0], []).append(one)
    found: dict[str, list[str]] = {}
    for file, tests in files.items():
        parts = [tests[first : first + MOST] for first in range(0, len(tests), MOST)]
        found |= {file if len(parts) == 1 else f"{file} {number}": part for number, part in enumerate(parts, 1)}
    return found


def in_turn(names: Sequence[str], record: Mapping[str, Ran]) -> list[str]:
    """Slices in the order in which they run: those that never ran or were not finished, then the oldest."""

    def place(name: str) -> tuple[bool, str]:
        ran = record.get(name)
        return (ran is not None and not ran.unfinished, "" if ran is None else ran.date)

    return sorted(names, key=place)


def expected_s(ran: Ran | None) -> float:
    """Seconds that a slice will take; twice as long as it had where that was not enough."""
    if ran is None:
        return UNKNOWN_S
    return max(AT_LEAST_S, ran.seconds * (2.0 if ran.unfinished else 1.1))


def read_record(path: Path) -> dict[str, Ran]:
    """What is known of earlier nights; empty: nothing."""
    if not path.exists():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Ran(**{**one, "failed": tuple(one["failed"]), "unfinished": tuple(one["unfinished"])})
        for name, one in raw.items()
    }


def write_record(path: Path, record: Mapping[str, Ran]) -> None:
    """Keep what is known, whole or as it was."""
    aside = path.with_suffix(".tmp")
    aside.write_text(
        json.dumps({name: asdict(record[name]) for name in sorted(record)}, indent=1) + "\n", encoding="utf-8"
    )
    aside.replace(path)


def run_slice(tests: Sequence[str], limit_s: float, workers: int = 1) -> Ran:
    """Run tests, so many at a time, until they have ended or the time is over; what they print is printed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-m",
            "full",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
            *(("-n", str(workers)) if workers > 1 else ()),
        ]
        with open(log, "w+b") as out:
            process = subprocess.Popen(
                [*command, *tests],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_ctrl_c,  # noqa: PLW1509 - no other thread holds a lock here
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then ends what its tests have started
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if process.returncode:
            print(text[-20_000:], flush=True)
        results = _results(report) if report.exists() else _printed_outcomes(text)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    failed = tuple(one for one in tests if results.get(one, ("", ""))[0] == "failed")
    skipped = {one: results[one][1] for one in tests if results.get(one, ("", ""))[0] == "skipped"}
    passed = sum(results.get(one, ("", ""))[0] == "passed" for one in tests)
    unfinished = tuple(one for one in tests if one not in results)
    return Ran(commit(), date, round(time.monotonic() - began, 1), passed, failed, skipped, unfinished)


def _heed_ctrl_c() -> None:
    """Undo what a shell does to what it runs in the background: it ignores SIGINT, and so would pytest."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _results(report: Path) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test of pytest's report, by its id."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        classes = str(case.get("classname")).rpartition(".")[2]
        if classes[:1].isupper():
            name = f"{case.get('file')}::{classes}::{case.get('name')}"
        bad = [one for kind in ("failure", "error") for one in case.iter(kind)]
        skips = list(case.iter("skipped"))
        found[name] = ("failed", "") if bad else ("skipped", str(skips[0].get("message"))) if skips else ("passed", "")
    return found


def _printed_outcomes(text: str) -> dict[str, tuple[str, str]]:
    """The same from what pytest printed, of tests that had ended before it was ended itself."""
    found = {}
    for line in text.splitlines():
        if ended := _ENDED.search(line):
            before, word, behind = ended.groups()
            if name := before or behind:
                outcome = {"PASSED": "passed", "SKIPPED": "skipped"}.get(word, "failed")
                found[name.strip().partition(" - ")[0]] = (outcome, "")
    return found


def commit() -> str:
    """Commit of this checkout, with ``+`` where a file but the record was changed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)


def collect() -> list[str]:
    """Ids of all tests that are marked ``full``, in pytest's order."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "full"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]


def table(record: Mapping[str, Ran], names: Sequence[str]) -> str:
    """A line a slice, in turn: when it ran, on what, how it ended."""
    lines = []
    for name in in_turn(names, record):
        ran = record.get(name)
        told = "never ran" if ran is None else f"{ran.date[:10]} on {ran.commit}: {_how(ran)}, {ran.seconds:.0f} s"
        lines.append(f"{name}: {told}")
    return "\n".join(lines)


def _how(ran: Ran) -> str:
    counts = {"failed": len(ran.failed), "skipped": len(ran.skipped), "not ended": len(ran.unfinished)}
    return ", ".join([f"{ran.passed} passed", *(f"{count} {what}" for what, count in counts.items() if count)])


def main(argv: Sequence[str]) -> int:
    """Run slices for some time; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tools.nightly", description="Run tests marked full in slices.")
    parser.add_argument("--minutes", type=float, default=80.0, help="time for all; default 80")
    parser.add_argument("--list", action="store_true", help="run nothing; say when each slice ran, and how it ended")
    parser.add_argument("--only", default="", help="slices whose name has this text alone")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time; default 2, since one waits a lot")
    given = parser.parse_args(argv)
    slices = {name: tests for name, tests in slices_of(collect()).items() if given.only in name}
    if not slices:
        print("no test marked full was collected", file=sys.stderr)
        return 2
    record = read_record(RECORD)
    if given.list:
        print(table(record, list(slices)))
        return 0
    end, wrong, left = time.monotonic() + 60 * given.minutes, False, []
    for name in in_turn(list(slices), record):
        left_s = end - time.monotonic()
        if left_s < min(expected_s(record.get(name)), 60 * given.minutes * 0.9):
            left.append(name)
            continue
        print(f"== {name}: {len(slices[name])} tests", flush=True)
        ran = run_slice(slices[name], left_s, given.workers)
        record[name] = ran
        write_record(RECORD, record)
        wrong |= bool(ran.failed)
        print(f"== {name}: {_how(ran)}, {ran.seconds:.0f} s", *ran.failed, sep="\n   ", flush=True)
    if left:
        print(f"{len(left)} of {len(slices)} slices are left for the next time, which begins with the oldest")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
