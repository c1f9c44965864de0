"""The table of a run's hooks in their order, from the list in ``megasdc.features``."""

from __future__ import annotations

from itertools import groupby

from megasdc.engine.hooks import PURPOSES
from megasdc.features import ORDER

MARKER = "tools.house hooks"


def draw_table() -> str:
    """The table in Markdown; hooks in brackets are there only where they are configured."""
    rows = ["", "| slot | hook | what |", "|---|---|---|"]
    lines = {slot: list(group) for slot, group in groupby(ORDER, key=lambda line: line.slot)}
    for slot, purpose in PURPOSES.items():
        rows.append(f"| **{slot}** | | *{purpose}* |")
        rows += [f"| | {f'`{one.hook}`' if one.always else f'(`{one.hook}`)'} | {one.what} |" for one in lines[slot]]
    return "\n".join([*rows, "", ""])
