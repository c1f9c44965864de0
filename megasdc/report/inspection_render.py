"""Contents of a checkpoint as text for a terminal."""

from __future__ import annotations

from typing import Any

from megasdc.checkpoint.marks import Standing
from megasdc.sdc.heat_map import ranges


def render_inspection(found: dict[str, Any]) -> str:
    """The result of ``inspect_checkpoint`` as text, one line per fact; unknown facts are omitted."""
    layout, model, states = found["layout"], found["model"], found["states"]
    shape = "" if layout is None else f"TP{layout['tensor']} x PP{layout['pipeline']} x DP{layout['data']}"
    storage = found["storage"] or ""
    loader = states.get("loader", {})
    counters = {name: value for name, value in states.items() if name not in ("loader", "random_generators")}
    random = states.get("random_generators")
    lines = {
        "format": found["format"],
        "step": "" if found["step"] is None else str(found["step"]),
        "saved": "" if found["time"] is None else f"{found['time']}, {_age(found['age_s'])} ago",
        "layout": shape,
        "storage": storage if found["node"] is None else f"{storage} (node {found['node']})",
        "model": ", ".join(f"{name} {value}" for name, value in model.items()),
        "audits": "" if found["standing"] is None else str(Standing(**found["standing"])),
        "engine": ", ".join(f"{key} {value}" for key, value in found["engine"].items()),
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "files": f"{found['num_files'] or 'no manifest'}, {_bytes(found['size_bytes'])}",
        "of that": ", ".join(f"{kind} {_bytes(size)}" for kind, size in found["size_bytes_by_kind"].items()),
        "states": ", ".join(f"{name} {_plain(value)}" for name, value in counters.items()),
        "loader": ", ".join(f"{name} {value}" for name, value in list(loader.items())[:6]),
        "random": ""
        if random is None
        else f"generators of {random['ranks'] - random['missing']} of {random['ranks']} ranks",
    }
    text = [found["path"], *(f"  {name:10} {value}" for name, value in lines.items() if value)]
    for node, wrote in found["written_by"].items():
        text.append(
            f"  {'node':10} {node}: ranks {ranges(wrote['ranks'])} wrote {wrote['num_files']} files, "
            f"{_bytes(wrote['size_bytes'])}"
        )
    for slot, one in found["slots"].items():
        size = f", {_bytes(one['size_bytes'])}" if one["size_bytes"] else ""
        dtypes = ", ".join(one["by_dtype"])
        text.append(
            f"  {slot:10} {one['num_parameters']:,} parameters in {one['num_tensors']:,} tensors, {dtypes}{size}"
        )
        if slot == next(iter(found["slots"])):
            kinds = (f"{kind} {part['num_parameters']:,}" for kind, part in one["by_kind"].items())
            text.append(f"  {'':10} {', '.join(kinds)}")
    text += [f"  NOT READ   {problem}" for problem in found["unread"]]
    return "\n".join(text)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
