"""What was found, as text."""

from __future__ import annotations

import json
from typing import Any

SHOWN_LINES = 14


def render(report: dict[str, Any], verbose: bool = False) -> str:
    """A table of parts, then what failed, what was not run and why, and the figures."""
    lines = ["", f"{'part':13}{'state':9}{'checks':>8}{'seconds':>9}  what"]
    for part in report["parts"]:
        held = sum(one["ok"] for one in part["checks"])
        count = f"{held}/{len(part['checks'])}" if part["checks"] else "-"
        why = f" - {part['reason']}" if part["reason"] else ""
        lines.append(f"{part['name']:13}{part['state']:9}{count:>8}{part['seconds']:9.1f}  {part['title']}{why}")
    for part in report["parts"]:
        lines += _details(part, verbose)
    states = [part["state"] for part in report["parts"]]
    counts = ", ".join(
        f"{states.count(one)} {one}" for one in ("passed", "failed", "killed", "not run") if one in states
    )
    lines.append(f"\n{counts} in {report['seconds']} s; files: {report['folder']}")
    return "\n".join(lines)


def _details(part: dict[str, Any], verbose: bool) -> list[str]:
    lines = []
    for one in part["checks"]:
        if not one["ok"]:
            detail = one["detail"].splitlines()[-SHOWN_LINES:]
            lines += [f"  FAILED {one['name']}", *(f"         {line[:220]}" for line in detail)]
        elif verbose:
            lines.append(f"  ok     {one['name']}" + (f": {one['detail'][:150]}" if one["detail"] else ""))
    lines += [f"  not run: {one['name']}: {one['reason']}" for one in part["not_run"]]
    lines += [
        f"  {name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in part["notes"].items()
    ]
    if part["state"] == "killed" and part["output"]:
        lines += ["  last words:", *(f"         {line[:220]}" for line in part["output"].splitlines()[-SHOWN_LINES:])]
    return [f"\n{part['name']}", *lines] if lines else []
