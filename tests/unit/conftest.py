"""What several folders of tests share: helpers, found by their names, and one browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser import Browser

for folder in ("checkpoint", "config", "interchange", "lab/report", "ops/archive", "output"):
    sys.path.append(str(Path(__file__).parent / folder))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    from browser import Browser

    started = Browser()
    yield started
    started.close()
