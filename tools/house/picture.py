"""Picture of a package: its rooms and which of them each imports, storeys as bands, as Mermaid for a markdown page.

An arrow that follows from others is left out: where a room imports a second one, and that a third, no arrow of its own
says that the first imports the third. Rooms of a circle have all arrows between them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tools.house.files import STOREYS, UPPER, room_of, rooms_of, storey_of
from tools.house.imports import File, Graph, reachable

MARKER = "house-picture"
EMPTY = {"__init__", *UPPER}
"""Rooms that are no more than the ``__init__`` of the package or of a storey."""


def draw(files: Mapping[str, File]) -> str:
    """Mermaid code of the picture, in a fence, with an end of line."""
    graph = {room: others - EMPTY for room, others in sorted(rooms_of(files).items()) if room not in EMPTY}
    storeys = {room_of(module): storey_of(module) for module in files}
    lines = ["```mermaid", "flowchart TD"]
    for storey in reversed(STOREYS):
        if rooms := [room for room in graph if storeys[room] == storey]:
            lines += [f"  subgraph {storey}", *(f'    {_node(room)}["{room}"]' for room in rooms), "  end"]
    for room, others in essential(graph).items():
        if others:
            lines.append(f"  {_node(room)} --> {' & '.join(map(_node, sorted(others)))}")
    return "\n".join([*lines, "```", ""])


def essential(graph: Graph) -> dict[str, frozenset[str]]:
    """Arrows that follow from no others; with them every node reaches what it reached, and circles are whole."""
    reach = {node: reachable(graph, node) for node in graph}

    def follows(node: str, other: str) -> bool:
        between = graph[node] - {other} - reach[other]
        return any(other in reach[one] and node not in reach[one] for one in between)

    return {node: frozenset(one for one in others if not follows(node, one)) for node, others in graph.items()}


def _node(room: str) -> str:
    """Name of a room in Mermaid, where ``end`` and dots mean something."""
    return "r_" + room.replace(".", "_")
