"""Contents of a checkpoint as a page of facts."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from megasdc.checkpoint.verify import Standing
from megasdc.common.words import duration, number_of, ranges
from megasdc.output.page import Page, PageSection


def inspection_page(found: dict[str, Any]) -> Page:
    """The page of a result of ``inspect_checkpoint``; unknown facts are omitted."""
    layout, states, storage = found["layout"], found["states"], found["storage"] or ""
    counters = {name: value for name, value in states.items() if name not in ("loader", "random_generators")}
    random = states.get("random_generators")
    facts = {
        "format": found["format"],
        "step": "" if found["step"] is None else str(found["step"]),
        "saved": "" if found["time"] is None else f"{found['time']}, {duration(found['age_s'])} ago",
        "layout": "" if layout is None else f"TP{layout['tensor']} x PP{layout['pipeline']} x DP{layout['data']}",
        "storage": storage if found["node"] is None else f"{storage} (node {found['node']})",
        "model": _listed(found["model"]),
        "moments": ""
        if (bits := found["quantized_moments_bits"]) is None
        else f"quantized to {bits} bits in the archive",
        "audits": "" if found["standing"] is None else str(Standing(**found["standing"])),
        "engine": _listed(found["engine"]),
        "versions": _listed(found["versions"]),
        "files": f"{found['num_files'] or 'no manifest'}, {decimal(found['size_bytes'])}",
        "of that": _listed({kind: decimal(size) for kind, size in found["size_bytes_by_kind"].items()}),
        "states": _listed({name: _plain(value) for name, value in counters.items()}),
        "loader": _listed(dict(list(states.get("loader", {}).items())[:6])),
        "random": ""
        if random is None
        else f"generators of {random['ranks'] - random['missing']} of {number_of(random['ranks'], 'rank')}",
        **{f"node {node}": _wrote(wrote) for node, wrote in found["written_by"].items()},
        **{slot: _slot(one) for slot, one in found["slots"].items()},
    }
    for one in list(found["slots"].values())[:1]:
        facts["parameters"] = _listed({kind: f"{part['num_parameters']:,}" for kind, part in one["by_kind"].items()})
    unread = [PageSection(items=[f"  NOT READ  {problem}" for problem in found["unread"]])] if found["unread"] else []
    shown = {name: value for name, value in facts.items() if value}
    return Page("Contents of a checkpoint", found["path"], sections=[PageSection(facts=shown), *unread])


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _wrote(wrote: dict[str, Any]) -> str:
    return f"ranks {ranges(wrote['ranks'])} wrote {wrote['num_files']} files, {decimal(wrote['size_bytes'])}"


def _slot(one: dict[str, Any]) -> str:
    size = f", {decimal(one['size_bytes'])}" if one["size_bytes"] else ""
    counts = f"{one['num_parameters']:,} parameters in {one['num_tensors']:,} tensors"
    return f"{counts}, {', '.join(one['by_dtype'])}{size}"


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
