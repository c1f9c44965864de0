"""Hostfile and filters: DeepSpeed's meaning, every problem with its line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megasdc.common.errors import LaunchError
from megasdc.ops.launch.hosts import Placement, place_on_hosts, place_on_this_host, read_hostfile

POOL = {"a": 2, "b": 3}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


def test_order_of_lines_is_order_of_ranks(tmp_path: Path) -> None:
    """Comments and empty lines are passed over; ranks go host by host."""
    pool = read_hostfile(written(tmp_path, "# head\n\nb slots=1\na  slots=2  # tail\n"))
    assert pool == {"b": 1, "a": 2}
    assert place_on_hosts(pool).host_of_rank == ["b", "a", "a"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a slots=1\na slots=2\n", "hostfile:2: host a is already on line 1"),
        ("a slots=two\n", "hostfile:1: got slots=two, need a whole number above 0"),
        ("a slots=0\n", "hostfile:1: got slots=0"),
        ("a 4\n", "hostfile:1: got `a 4`, need `NAME slots=N`"),
        ("-oProxyCommand=x slots=1\n", "hostfile:1: got host name `-oProxyCommand=x`"),
        ("a;b slots=1\n", "hostfile:1: got host name `a;b`"),
        ("n[1-2] slots=1\n", "hostfile:1: got host name `n[1-2]`"),
        ("# nothing\n", "names no host"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, problem: str) -> None:
    """The message gives file, line, what was got and what is needed."""
    with pytest.raises(LaunchError, match="hostfile") as caught:
        read_hostfile(written(tmp_path, text))
    assert problem in str(caught.value)


def test_all_bad_lines_are_told_at_once(tmp_path: Path) -> None:
    """Two bad lines give two problems."""
    with pytest.raises(LaunchError) as caught:
        read_hostfile(written(tmp_path, "a\nb\n"))
    assert len(str(caught.value).splitlines()) == 2


def test_an_encoding_that_deepspeed_misreads_is_named(tmp_path: Path) -> None:
    """A byte order mark, with the command that removes it, and UTF-16; ends of lines of Windows do not matter."""
    path = tmp_path / "hostfile"
    path.write_bytes(b"\xef\xbb\xbfa slots=1\r\nb slots=2\r\n")
    with pytest.raises(LaunchError, match="starts with a byte order mark") as caught:
        read_hostfile(path)
    subprocess.run(str(caught.value).rpartition("remove it: ")[2], shell=True, check=True)
    assert read_hostfile(path) == {"a": 1, "b": 2}
    path.write_text("a slots=1\n", encoding="utf-16")
    with pytest.raises(LaunchError, match="is not UTF-8 text"):
        read_hostfile(path)


def test_missing_hostfile_is_an_error(tmp_path: Path) -> None:
    """DeepSpeed would warn and run locally."""
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, {"a": [0, 1], "b": [0, 1, 2]}),
        ({"include": "b"}, {"b": [0, 1, 2]}),
        ({"include": "b:2,0@a:1"}, {"a": [1], "b": [0, 2]}),
        ({"exclude": "a"}, {"b": [0, 1, 2]}),
        ({"exclude": "b:1@a:0,1"}, {"b": [0, 2]}),
        ({"num_gpus": 2}, {"a": [0, 1], "b": [0, 1]}),
    ],
)
def test_filters_agree_with_deepspeed(options: dict, slots: dict) -> None:
    """DeepSpeed's own functions are the oracle."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert place_on_hosts(POOL, **options) == Placement(slots, remote=True)
    theirs = runner.parse_inclusion_exclusion(POOL, options.get("include", ""), options.get("exclude", ""))
    if not hasattr(runner, "apply_num_nodes_and_gpus"):
        pytest.skip("DeepSpeed before 0.19.7 does this inside main()")
    theirs = runner.apply_num_nodes_and_gpus(theirs, -1, options.get("num_gpus", -1))
    assert list(theirs.items()) == list(slots.items())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"include": "c"}, "names host `c`; the hostfile has a, b"),
        ({"exclude": "a:7"}, "names slot `7`; a has 0, 1"),
        ({"exclude": "a@b"}, "leaves no host of a, b"),
        ({"include": "a", "exclude": "b"}, "give one of them"),
        ({"num_gpus": 3}, "a has 2 slots"),
        ({"num_gpus": 1, "include": "a"}, "cannot be combined"),
    ],
)
def test_bad_filters_are_refused(options: dict, problem: str) -> None:
    """The message says which part and what exists."""
    with pytest.raises(LaunchError) as caught:
        place_on_hosts(POOL, **options)
    assert problem in str(caught.value)


def test_visible_devices_choose_the_slots_of_this_host() -> None:
    """DeepSpeed ignores CUDA_VISIBLE_DEVICES beside --num_gpus; the front does not."""
    assert place_on_this_host(1, "2,3").slots == {"localhost": [2]}
    assert place_on_this_host(None, "2,3").slots == {"localhost": [2, 3]}
    assert place_on_this_host(2).slots == {"localhost": [0, 1]}


@pytest.mark.parametrize(
    ("num_gpus", "visible_devices", "problem"),
    [
        (None, None, "--num-ranks is missing; without a hostfile give the number of ranks"),
        (0, None, "got --num-ranks 0; without a hostfile"),
        (3, "0,1", "got --num-ranks 3 with CUDA_VISIBLE_DEVICES=0,1"),
        (1, "GPU-8a", "got CUDA_VISIBLE_DEVICES=GPU-8a; DeepSpeed needs plain device numbers"),
    ],
)
def test_a_number_of_ranks_that_this_host_cannot_have(
    num_gpus: int | None, visible_devices: str | None, problem: str
) -> None:
    """The message says what was given, and what is missing."""
    with pytest.raises(LaunchError) as caught:
        place_on_this_host(num_gpus, visible_devices)
    assert problem in str(caught.value)
