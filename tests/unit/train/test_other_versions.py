"""Is it said that a run goes on under other versions than those that saved it?"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.checkpoint.manifest import installed_versions
from megasdc.events import EventLog, read_events
from megasdc.train.resume import log_other_versions

OTHER = {"deepspeed": "0.1.0", "torch": "2.1.0"}


def test_other_versions_are_named_and_the_same_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An event and a warning name each package with both versions; where all are the same there is neither."""
    run: Any = SimpleNamespace(events=EventLog(tmp_path, 0), step=4)
    here = installed_versions()
    logging.getLogger("megasdc").propagate = True
    with caplog.at_level(logging.WARNING):
        log_other_versions(run, here)
    assert not caplog.messages and not list(read_events(tmp_path, kind="resume"))
    with caplog.at_level(logging.WARNING):
        log_other_versions(run, {**here, **OTHER})
    (event,) = read_events(tmp_path, kind="resume", name="other_versions")
    assert event.fields == {"versions": {name: [then, here[name]] for name, then in OTHER.items()}}
    (message,) = caplog.messages
    assert f"deepspeed 0.1.0, here {here['deepspeed']}; torch 2.1.0, here {here['torch']}" in message
