"""Incidents in a run folder: findings of corruption and standstills, which ones are there and what each says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERNS = ("reports/incident_*.json", "health/incidents/*.json")


@dataclass(frozen=True)
class IncidentFile:
    """An incident as it is told to people.

    Args:
        path: of its JSON file.
        title: kind of the incident.
        text: what happened, in a sentence.
        page: its page; None: it has none.
    """

    path: Path
    title: str
    text: str
    page: Path | None


def list_incidents(run_dir: Path) -> list[Path]:
    """Files of all incidents of a run."""
    return sorted(path for pattern in PATTERNS for path in run_dir.glob(pattern))


def read_incident(path: Path) -> IncidentFile:
    """Read what is told of an incident.

    Raises:
        ValueError: it is damaged.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no incident")
    page = path.with_suffix(".html")
    return IncidentFile(path, *_describe(content), page if page.exists() else None)


def _describe(content: dict[str, Any]) -> tuple[str, str]:
    """Title and text: those of a standstill are in its file, those of a finding of corruption are made from it."""
    if "kind" in content:
        return str(content["kind"]), str(content.get("message", ""))
    suspects = content.get("flagged") or content.get("disputed") or []
    ranks = ", ".join(f"rank {one['rank']} on {one['host']}" for one in suspects)
    named = "named as wrong" if content.get("flagged") else "differ, and one of them is wrong"
    text = f"step {content['step']}, {content['tier']}: {ranks} {named}; {content['verdict']}, {content['done']}"
    return "silent data corruption", text
