"""What tests of pages share: one browser, and checkpoints written without an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    started = Browser()
    yield started
    started.close()
