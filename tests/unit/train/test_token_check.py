"""A file that cannot be read a second time accuses no rank; one that is read decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.common.errors import DataError
from megasdc.events import EventLog, read_events
from megasdc.train.detection.data_checks import TokenCheck

TOKENS = torch.arange(8).view(1, 8)


def look(folder: Path, from_file: Any) -> Any:
    """What is found where the model was given ``TOKENS``."""
    batches: Any = SimpleNamespace(positions=lambda _: [0], from_file=from_file)
    engine: Any = SimpleNamespace(
        step_number=3,
        is_last_stage=lambda: False,
        is_first_stage=lambda: True,
        module=torch.nn.Identity(),
    )
    events = EventLog(folder, 0)
    check = TokenCheck(batches, events)
    check.choose([0])
    check.before_forward(engine, 0)
    engine.module(TOKENS)
    check.after_forward(engine, 0)
    found = check.compare(engine)
    events.close()
    return found


def test_a_file_system_that_is_away_is_no_finding(tmp_path: Path) -> None:
    """It is told, once for the micro-batch; a block that is damaged ends the run."""

    def away(_: int) -> Any:
        raise OSError(5, "Input/output error")

    def damaged(_: int) -> Any:
        raise DataError("block 3 is damaged")

    assert look(tmp_path, away) is None
    (told,) = read_events(tmp_path, kind="warning", name="tokens_not_compared")
    assert told.step == 3 and "Input/output error" in told.fields["problem"]
    assert look(tmp_path, damaged).ends_with is DataError


def test_a_block_is_damaged_if_it_is_so_twice(tmp_path: Path) -> None:
    """What the second reading finds is compared, and told."""
    reads: list[Any] = [DataError("block 3 is damaged"), (TOKENS, (TOKENS, TOKENS))]

    def once(_: int) -> Any:
        if isinstance(found := reads.pop(0), DataError):
            raise found
        return found

    assert look(tmp_path, once) is None and not reads
    (told,) = read_events(tmp_path, kind="warning", name="tokens_read_again")
    assert told.fields["problem"] == "block 3 is damaged"


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_read_decides(tmp_path: Path, wrong: int) -> None:
    """Equal numbers are none, one that differs is a finding."""
    found = look(tmp_path, lambda _: (TOKENS + wrong, (TOKENS, TOKENS)))
    assert (found is not None) == bool(wrong)
