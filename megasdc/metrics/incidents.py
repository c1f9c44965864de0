"""Incidents in a run folder: findings of corruption and hangs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json

PATTERNS = ("reports/incident_*.json", "health/incidents/*.json")
UNREADABLE = "incident that cannot be read"


@dataclass(frozen=True)
class IncidentFile:
    """Title and text of an incident, for trackers.

    Args:
        title: kind of the incident.
        text: what happened, in a sentence.
        files: its JSON file and its page, as far as they are there and can be read.
    """

    title: str
    text: str
    files: tuple[Path, ...]


def list_incidents(run_dir: Path) -> list[Path]:
    """Files of all incidents of a run."""
    return sorted(path for pattern in PATTERNS for path in run_dir.glob(pattern))


def read_incident(path: Path) -> IncidentFile:
    """Read title and text of an incident; those of a damaged file report that it is damaged."""
    page = path.with_suffix(".html")
    files = (path, page) if page.exists() else (path,)
    try:
        return IncidentFile(*_describe(parse_json(path.read_text(encoding="utf-8"))), files)
    except OSError as error:
        return IncidentFile(UNREADABLE, f"{path} cannot be read: {error}", ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return IncidentFile(UNREADABLE, f"{path} is damaged: {error!r}", files)


def _describe(content: dict[str, Any]) -> tuple[str, str]:
    """Title and text: those of a standstill are in its file, those of a finding of corruption are made from it."""
    if "kind" in content:
        return str(content["kind"]), str(content.get("message", ""))
    suspects = content.get("flagged") or content.get("disputed") or []
    ranks = ", ".join(f"rank {one['rank']} on {one['host']}" for one in suspects)
    named = "named as wrong" if content.get("flagged") else "differ, and one of them is wrong"
    text = f"step {content['step']}, {content['tier']}: {ranks} {named}; {content['verdict']}, {content['done']}"
    return "silent data corruption", text
