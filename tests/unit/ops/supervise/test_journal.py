"""A supervisor's journal survives kills at any byte, and notices any change."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.common.errors import LaunchError, StorageError
from megasdc.ops.supervise.journal import JOURNAL_FILE, Journal, read_journal

SAID: list[str] = []


def written(folder: Path) -> bytes:
    """A journal of three entries."""
    with Journal(folder, SAID.append) as journal:
        for number in range(3):
            journal.write("planned", attempt=number, hosts=["a", "b"], why="it is the first")
    return (folder / JOURNAL_FILE).read_bytes()


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Numbers, kinds and fields; more are added behind them."""
    written(tmp_path)
    with Journal(tmp_path, SAID.append) as journal:
        assert [(one.number, one.kind, one.fields["attempt"]) for one in journal.entries] == [
            (1, "planned", 0),
            (2, "planned", 1),
            (3, "planned", 2),
        ]
        entry = journal.write("ended", exit_code=78, hosts=("a",))
        assert entry.fields == {"exit_code": 78, "hosts": ["a"]}, "as it is read again"
    with Journal(tmp_path, SAID.append) as journal:
        assert journal.entries[-1] == entry


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    """At every byte of the last line, its end included: the entries before it stay, and the next one follows them."""
    content = written(tmp_path)
    start = content[:-1].rfind(b"\n") + 1
    for size in range(start, len(content)):
        (tmp_path / JOURNAL_FILE).write_bytes(content[:size])
        said: list[str] = []
        with Journal(tmp_path, said.append) as journal:
            assert [one.number for one in journal.entries] == [1, 2]
            assert bool(said) == (size > start)
            journal.write("ended", exit_code=0)
        with Journal(tmp_path, said.append) as journal:
            assert [one.kind for one in journal.entries] == ["planned", "planned", "ended"]


def test_each_change_is_noticed(tmp_path: Path) -> None:
    """A flipped bit anywhere but in the last line's end, a line that is missing, swapped or repeated, another run's."""
    content = written(tmp_path)
    path = tmp_path / JOURNAL_FILE
    lines = content.splitlines(keepends=True)
    other = written(tmp_path / "other").splitlines(keepends=True)
    changed = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(len(content) - 1)]
    changed += [b"".join(one) for one in (lines[1:], [lines[1], lines[0], lines[2]], [*lines, lines[2]])]
    changed += [lines[0] + other[1], lines[0] + b"[]\n", b"{}\n" + lines[1]]
    for one in changed:
        path.write_bytes(one)
        with pytest.raises(StorageError, match="journal"):
            Journal(tmp_path, SAID.append)
        with pytest.raises(StorageError, match="the next start of the supervisor writes it anew"):
            read_journal(tmp_path)
        assert path.read_bytes() == one, "nothing is lost"


@pytest.mark.slow
def test_a_damaged_line_costs_no_other_one(tmp_path: Path) -> None:
    """A flipped bit anywhere, the end of the last line included: the file stays aside, and the other entries are kept.

    Where only a checksum is damaged its own line is kept, too, unless it is the last one.
    """
    content = written(tmp_path)
    path, num_lost = tmp_path / JOURNAL_FILE, 0
    for at in range(len(content)):
        one = content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
        path.write_bytes(one)
        with Journal(tmp_path, SAID.append, lambda kept: kept) as journal:
            *entries, last = journal.entries
            of_line = content[:at].count(b"\n")
            kept = [number for number in range(3) if number != of_line or len(entries) == 3]
            if content[at : at + 1] == b"\n" and of_line < 2:  # two lines in one
                kept = [number for number in range(3) if number - of_line not in (0, 1)]
            assert [entry.fields["attempt"] for entry in entries] == kept, at
            aside = tmp_path / last.fields["aside"]
            assert last.kind == "damaged" and aside.read_bytes() == one
            num_lost += last.fields["lost"]
            journal.write("ended", exit_code=0)
        assert [entry.kind for entry in read_journal(tmp_path)] == ["planned"] * len(kept) + ["damaged", "ended"]
        aside.unlink()
    assert 0 < num_lost < len(content)


def test_a_supervisor_whose_lock_was_given_to_another_writes_nothing(tmp_path: Path) -> None:
    """As after a network split: the other one's entries stay as they are; likewise where the file was replaced."""
    with Journal(tmp_path, SAID.append) as lost:
        lost.write("opened", config="a")
        fcntl.flock(lost._lock, fcntl.LOCK_UN)  # as a file server does that takes a host for lost
        with Journal(tmp_path, SAID.append) as other:
            other.write("taken_over")
            content = other.path.read_bytes()
            with pytest.raises(LaunchError, match="another supervisor of this run"):
                lost.write("planned", attempt=1)
            assert other.path.read_bytes() == content
            other.write("planned", attempt=1)
            shutil.copy(other.path, tmp_path / "copy")
            os.replace(tmp_path / "copy", other.path)
            with pytest.raises(LaunchError, match="another supervisor of this run"):
                other.write("ended")
            other.path.unlink()
            with pytest.raises(StorageError, match="cannot be written"):
                other.write("ended")


def test_only_one_supervisor_has_it(tmp_path: Path) -> None:
    """A second one is refused, until the first has ended, also if it was killed."""
    code = (
        "import sys, time; from pathlib import Path; from megasdc.ops.supervise.journal import Journal\n"
        f"journal = Journal(Path({str(tmp_path)!r}), print); journal.write('opened'); print('ready', flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with pytest.raises(LaunchError, match="in use by another supervisor"):
            Journal(tmp_path, SAID.append)
        process.kill()
    with Journal(tmp_path, SAID.append) as journal:
        assert [one.kind for one in journal.entries] == ["opened"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(StorageError, match="cannot be opened"):
        Journal(tmp_path / "file", SAID.append)
