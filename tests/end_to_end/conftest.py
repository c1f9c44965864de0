"""What tests of the real launcher share with those of several ranks: helpers, and the processors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DISTRIBUTED = HERE.parent / "distributed"
sys.path.append(str(DISTRIBUTED))  # harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of launches, which wait for most of their time, stand evenly between those of tests with ranks."""
    launches = list(dict.fromkeys(one.path for one in items if one.path.parent == HERE))
    ranks = list(dict.fromkeys(one.path for one in items if one.path.parent == DISTRIBUTED))
    places = {path: float(number) for number, path in enumerate(ranks)}
    places |= {path: number * len(ranks) / len(launches) - 0.5 for number, path in enumerate(launches)}
    items.sort(key=lambda one: places.get(one.path, len(ranks)))
