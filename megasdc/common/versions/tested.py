"""Versions that megasdc permits, and every combination of versions that was run.

The tables of versions in the documentation are generated from here (``megasdc config-table --write FILE``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUN_HERE = "run here"
RUN_ON_GPU = "run on a GPU machine"
NOT_RUN = "not run"

NAMES = {"python": "Python", "torch": "PyTorch", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-core"}
"""Component by its key: ``python``, or the name of a distribution."""


@dataclass(frozen=True)
class ReleaseRange:
    """Permitted releases of a component: ``X.Y``, oldest first.

    ``parts``: how many numbers of a version are compared: 2, or 3 where a patch release may break megasdc.
    """

    minors: tuple[str, ...]
    parts: int = 2

    def __str__(self) -> str:
        return self.minors[0] if len(self.minors) == 1 else f"{self.minors[0]} to {self.minors[-1]}"


PERMITTED = {
    "python": ReleaseRange(("3.11", "3.12", "3.13")),
    "torch": ReleaseRange(("2.10", "2.11", "2.12", "2.13")),
    "deepspeed": ReleaseRange(("0.19",), parts=3),
    "megatron-core": ReleaseRange(("0.16", "0.17", "0.18", "0.19")),
}
"""``setup.py`` permits the same. DeepSpeed by patch release, since megasdc builds on its private names."""


@dataclass(frozen=True)
class Combination:
    """Versions that were run together, such as ``3.11.7``, on an ISO 8601 date; ``what``: what was run, with counts.

    ``state`` is ``RUN_HERE``: trained on CPUs, with gloo; ``RUN_ON_GPU``: on NVIDIA GPUs; ``NOT_RUN``: nothing was
    trained with them, whatever unit tests said.
    """

    python: str
    torch: str
    deepspeed: str
    megatron_core: str
    state: str
    what: str
    date: str

    @property
    def versions(self) -> dict[str, str]:
        """Version by component."""
        return dict(zip(NAMES, (self.python, self.torch, self.deepspeed, self.megatron_core), strict=True))


COMBINATIONS = (
    Combination("3.11.7", "2.13.0", "0.19.8", "0.16.1", RUN_HERE, "everything that CI runs", "2026-11-23"),
    Combination(
        *("3.11.7", "2.10.0", "0.19.0", "0.16.0", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,272 passed, 35 skipped, 1 failed; checkpoints carried to "
        "and from the first set",
        "2026-11-24",
    ),
    Combination(
        *("3.12.1", "2.11.0", "0.19.4", "0.17.1", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,273 passed, 35 skipped",
        "2026-11-24",
    ),
    Combination(
        *("3.12.1", "2.11.0", "0.19.8", "0.16.1", RUN_HERE),
        "`tests/gpu.sh` on a processor, DeepSpeed and Megatron-core as wheels, without a compiler",
        "2026-11-23",
    ),
    Combination(
        *("3.12.3", "2.11.0", "0.19.8", "0.16.1", RUN_ON_GPU),
        "`tests/gpu.sh` on one H100, in parts: training, determinism, kernels, checks, referee",
        "2026-11-27",
    ),
    Combination(
        *("3.12.1", "2.12.1", "0.19.8", "0.18.2", RUN_HERE),
        "`tests/versions.sh`: the smoke run; unit tests: 3,297 passed, 11 skipped",
        "2026-11-24",
    ),
    Combination(
        *("3.13.0", "2.13.0", "0.19.8", "0.19.2", RUN_HERE),
        "`tests/versions.sh`, its install included: the smoke run; unit tests: 3,296 passed, 11 skipped, 1 failed",
        "2026-11-23",
    ),
)


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.10.0a0+b4e4ee8`` is (2, 10, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def short_version(component: str, version: str) -> str:
    """The numbers of a version that are compared: ``2.10.0a0+b4e4ee8`` is PyTorch 2.10."""
    return ".".join(map(str, version_numbers(version)[: PERMITTED[component].parts]))


def versions_state(versions: Mapping[str, str], on_gpu: bool) -> str:
    """State of a combination of versions by component; other packages are ignored.

    One of the three states; on a GPU, versions that were run on CPUs only are ``RUN_HERE``.
    """
    wanted = _short(versions)
    states = {one.state for one in COMBINATIONS if _short(one.versions) == wanted}
    first, second = (RUN_ON_GPU, RUN_HERE) if on_gpu else (RUN_HERE, RUN_ON_GPU)
    return first if first in states else second if second in states else NOT_RUN


def _short(versions: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(short_version(name, versions[name]) for name in NAMES)


def spell(versions: Mapping[str, str]) -> str:
    """Versions as text: ``Python 3.11.7, PyTorch 2.13.0, DeepSpeed 0.19.8, Megatron-core 0.16.1``."""
    return ", ".join(f"{NAMES[name]} {versions[name]}" for name in NAMES)


def render_tables() -> str:
    """Markdown tables: each component's permitted versions by state, and the combinations that were run."""
    lines = [f"| component | permitted | {RUN_HERE} | {RUN_ON_GPU} | {NOT_RUN} |", "|---|---|---|---|---|"]
    for name, permitted in PERMITTED.items():
        seen = {
            state: _unique([one.versions[name] for one in COMBINATIONS if one.state == state])
            for state in (RUN_HERE, RUN_ON_GPU)
        }
        known = {".".join(version.split(".")[:2]) for versions in seen.values() for version in versions}
        left = [minor for minor in permitted.minors if minor not in known]
        if permitted.parts > 2:
            left.append("other patch releases")
        cells = (NAMES[name], str(permitted), *(", ".join(seen[state]) for state in seen), ", ".join(left))
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += ["", f"| {' | '.join(NAMES.values())} | state | what was run | date |", "|---|---|---|---|---|---|---|"]
    for one in COMBINATIONS:
        lines.append("| " + " | ".join((*one.versions.values(), one.state, one.what, one.date)) + " |")
    return "\n".join(lines) + "\n"


def _unique(versions: list[str]) -> list[str]:
    """Distinct versions, oldest first."""
    return sorted(set(versions), key=lambda version: (version_numbers(version), version))
