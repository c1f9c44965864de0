"""The address at which a host's memory can be reached by a partner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.train import isolation


def address(monkeypatch: pytest.MonkeyPatch, first: str, *names: str) -> str:
    """Of the first of some hosts, whose name for itself is ``first``."""
    monkeypatch.setenv("MASTER_ADDR", first)
    monkeypatch.setattr(isolation, "gather_objects", lambda _own, _group: list(names))
    run: Any = SimpleNamespace(dims=SimpleNamespace(rank=0), host_group=None)
    return isolation.own_address(run)


def test_a_name_that_means_the_host_itself_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to another host counts; with names that nobody knows the own one stays; else there is no address."""
    assert address(monkeypatch, "127.0.0.1", "here", "unknown.invalid", "127.0.0.9") == "127.0.0.1"
    assert address(monkeypatch, "127.0.0.1", "here", "unknown.invalid") == "127.0.0.1"
    assert address(monkeypatch, "unknown.invalid", "here", "there") == ""
