"""The preset `protect`: fields that one word stands for, what they leave uncovered, and the lines of a start on both.

A configuration is expanded where it is loaded, before the number of ranks is known: what depends on replicas or hosts
is null, which says so (`audit.permuted`, `checkpoint.memory.partners`). The file that a run keeps, `check-config
--show`, `coverage`, dry runs and resumes so have the same fields. Fields that a file gives win. The preset asks for
nothing that the rest of the file forbids, never turns recomputation on, and never changes the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from megasdc.config.contradictions import DETERMINISTIC_MEGATRON_FIELDS, checks_nothing, detects
from megasdc.config.deepspeed import recompute_interval_of
from megasdc.config.detection import EXTRA
from megasdc.config.read import shown
from megasdc.config.schema import given_or_default, is_set, unmet_paths, value_of
from megasdc.config.sections import OFF, STRICT, MegasdcSection

SLICE_ELEMENTS = 16384
"""Elements of each shard in a look: a few milliseconds on a processor."""
LONGEST_AUDIT_INTERVAL = 1000
MEMORY_INTERVAL = 10
"""Steps between snapshots in memory: what a restart recomputes at most."""
VERDICTS = ("persistent", "intermittent", "not_reproduced", "inconclusive")
ENABLED = "sdc.always_on.enabled"
Sections = TypeVar("Sections", bound=BaseModel)


@dataclass(frozen=True)
class Gap:
    """Something that a run does not cover, a text each.

    Args:
        what: what is not covered.
        why: why not.
        needed: what would cover it.
    """

    what: str
    why: str
    needed: str

    def __str__(self) -> str:
        return f"{self.what} ({self.why}; needed: {self.needed})"


def wanted_fields(file: MegasdcSection, deepspeed: Mapping[str, Any], *, deterministic: bool) -> dict[str, Any]:
    """Values that the word `protect` of a file stands for, by path below `megasdc`, without those that it forbids.

    Args:
        file: the file's sections; of fields that are among the result none is read.
        deepspeed: DeepSpeed's keys with defaults filled in.
        deterministic: whether the run is deterministic, without which no results are compared.
    """
    if file.protect == OFF or file.study.mode is not None:
        return {}
    wanted: dict[str, Any] = {
        "checkpoint.writing": "auto",
        "checkpoint.memory.interval": MEMORY_INTERVAL,
        "checkpoint.memory.partners": None,
        "checkpoint.memory.without_room": "go_on",
        "health.enabled": None,
    }
    if file.model.backend != "torch":
        return wanted
    if _against_determinism(file) is None:
        wanted["determinism.enabled"] = True
    if not deterministic:
        return wanted
    always_on: dict[str, Any] = {name: True for name in ("enabled", "parameters", "chain", "finite", "tokens", "rows")}
    always_on |= {"recompute": None, "coverage": "auto"}
    if deepspeed["optimizer"]["params"]["torch_adam"]:
        always_on["slice_elements"] = SLICE_ELEMENTS
    audit = {
        "enabled": True,
        "micro_batch": EXTRA,
        "interval": 50,
        "longest_interval": LONGEST_AUDIT_INTERVAL,
        "verify_checkpoints": True,
        "permuted": None,
    }
    wanted |= {f"audit.{name}": value for name, value in audit.items()}
    wanted |= {f"sdc.always_on.{name}": value for name, value in always_on.items()}
    wanted |= {f"sdc.policy.{name}": "halt" if file.protect == STRICT else "repair" for name in VERDICTS}
    return wanted | {"sdc.budget": None, "sdc.golden_at_start": True}


def missing_fields(file: MegasdcSection, deepspeed: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the preset adds to a file, by path; none that would have no effect beside what the file gives.

    Args:
        file: the file's sections, with defaults where it gives nothing.
        given: the sections that it gives, as they are in JSON.
    """
    chosen = is_set(given, "determinism.enabled")
    deterministic = file.determinism.enabled if chosen else _against_determinism(file) is None
    wanted = wanted_fields(file, deepspeed, deterministic=deterministic)
    recomputes = bool(recompute_interval_of(deepspeed))
    return fitting_fields(file, wanted, given, lambda merged: checks_nothing(merged, recomputes=recomputes))


def fitting_fields(
    file: Sections, wanted: Mapping[str, Any], given: Mapping[str, Any], checks_nothing: Callable[[Sections], bool]
) -> dict[str, Any]:
    """Fields of a preset that a file does not give, and that are no defaults and have an effect beside what it gives.

    Args:
        file: the file's sections, of a run or of a guard.
        wanted: fields of the preset, by path.
        given: the sections that the file gives, as they are in JSON.
        checks_nothing: whether the checks of every step, where they are enabled, are none.
    """
    added = {
        path: value
        for path, value in wanted.items()
        if not is_set(given, path) and value != given_or_default(type(file), {}, path)
    }
    while True:
        merged = _with_fields(file, added)
        without = unmet_paths(merged) & added.keys()
        if checks_nothing(merged):
            without |= {ENABLED} & added.keys()
        if not without:
            return added
        added = {path: value for path, value in added.items() if path not in without}


def _with_fields(file: Sections, fields: Mapping[str, Any]) -> Sections:
    raw = file.model_dump(mode="json")
    for path, value in fields.items():
        put(raw, path, value)
    return type(file).model_validate(raw)


def put(sections: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path of sections in JSON, in place."""
    *names, last = path.split(".")
    for name in names:
        sections = sections.setdefault(name, {})
    sections[last] = value


def _against_determinism(file: MegasdcSection) -> tuple[str, str] | None:
    """Setting that forbids deterministic mode, and what is needed instead; None: no setting does."""
    if file.parallel.threads == 0:
        return "parallel.threads is 0", "a number of threads"
    for name, wanted in DETERMINISTIC_MEGATRON_FIELDS.items():
        if (got := file.model.megatron.get(name, wanted)) != wanted:
            return f"model.megatron.{name} is {shown(got)}", shown(wanted)
    return None


def own_settings(file: MegasdcSection, deepspeed: Mapping[str, Any]) -> list[str]:
    """Fields whose value is not that of the preset, since the file gives them: a text with both values each."""
    return overridden(file, wanted_fields(file, deepspeed, deterministic=file.determinism.enabled))


def overridden(file: BaseModel, wanted: Mapping[str, Any]) -> list[str]:
    """Fields that have an effect, and another value than a preset wants: a text with both values each."""
    unmet = unmet_paths(file)
    return [
        f"{path} {shown(got)} (preset: {shown(value)})"
        for path, value in wanted.items()
        if path not in unmet and (got := value_of(file, path)) != value
    ]


def find_gaps(
    file: MegasdcSection, deepspeed: Mapping[str, Any], replicas: int | None = None, hosts: int | None = None
) -> Iterator[Gap]:
    """Yield what a run with a preset does not cover.

    Args:
        replicas: number of replicas; None: not known.
        hosts: number of hosts; None: not known.
    """
    if file.study.mode is not None:
        yield Gap("everything", f'study.mode is "{file.study.mode}", which compares its replicas itself', "no study")
        return
    yield from _gaps_of_results(file, deepspeed, replicas)
    if not file.checkpoint.interval:
        yield Gap("checkpoints while training", "checkpoint.interval is 0", "an interval")
    if not file.checkpoint.memory.interval:
        yield Gap("restarts from memory", "checkpoint.memory.interval is 0", "an interval")
    elif hosts == 1:
        yield Gap("the loss of the host's memory", "there is one host", "two hosts")


def _gaps_of_results(file: MegasdcSection, deepspeed: Mapping[str, Any], replicas: int | None) -> Iterator[Gap]:
    section = file.sdc.always_on
    if file.model.backend != "torch":
        yield Gap("wrong results", f'model.backend is "{file.model.backend}", which hides submodules', '"torch"')
        return
    if not file.determinism.enabled:
        why, needed = _against_determinism(file) or ("determinism.enabled is false", "true")
        yield Gap("wrong results", why, needed)
        return
    if not file.audit.enabled:
        yield Gap("backward faults outside of looks", "audit.enabled is false", "true")
    elif replicas == 1:
        yield Gap("audits against another replica", "there is one, which is compared with itself", "two replicas")
    if not section.enabled:
        yield Gap("what happens between audits", "sdc.always_on.enabled is false", "true")
        return
    if not recompute_interval_of(deepspeed):
        needed = "pipeline.activation_checkpoint_interval, which computes each forward pass twice"
        yield Gap("forward results between audits, but for a row's sums", "nothing is recomputed", needed)
    if not deepspeed["optimizer"]["params"]["torch_adam"]:
        yield Gap("sums over replicas and updates", "optimizer.params.torch_adam is false", "true")
    if (deepspeed["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none":
        yield Gap("the gradient's norm", "the optimizer's state is offloaded", "no zero_optimization.offload_optimizer")
    if file.sdc.golden is None:
        needed = "sdc.golden, a trace of trusted hosts (megasdc golden record)"
        yield Gap("faults that all replicas have in common", "there is no golden trace", needed)


def start_lines(
    file: MegasdcSection, deepspeed: Mapping[str, Any], replicas: int | None = None, hosts: int | None = None
) -> list[str]:
    """Lines on a run's protection: covered, cost, not covered, and what the file sets in another way than the preset.

    Args:
        replicas: number of replicas; None: not known.
        hosts: number of hosts; None: not known.
    """
    if file.protect == OFF:
        return []
    gaps = find_gaps(file, deepspeed, replicas, hosts)
    covered, cost = _covered(file, replicas, hosts), _cost(file, replicas)
    return protection_lines(file.protect, covered, cost, gaps, own_settings(file, deepspeed))


def protection_lines(
    word: str, covered: Iterable[str], cost: str, gaps: Iterable[Gap], own: Sequence[str]
) -> list[str]:
    """The lines of a start: what is covered, its cost, what is not, and ``own`` settings where there are any."""
    lines = [
        f"protect {word}, covered: {'; '.join(covered) or 'nothing'}",
        f"protect {word}, cost: {cost}",
        f"protect {word}, not covered: {'; '.join(map(str, gaps)) or 'nothing of what a run can check'}",
    ]
    return [*lines, f"protect {word}, set in another way by you: {'; '.join(own)}"] if own else lines


def _covered(file: MegasdcSection, replicas: int | None, hosts: int | None) -> Iterator[str]:
    audit, section, memory = file.audit, file.sdc.always_on, file.checkpoint.memory
    if audit.enabled:
        whom = {None: "replicas, or of one with itself", 1: "the replica with itself"}.get(replicas, "all replicas")
        yield f"every result of a micro-batch compared bit by bit, of {whom}, every {audit.intervals} steps"
    if section.enabled:
        checks = [
            *["tokens"] * section.tokens,
            *["parameters"] * section.parameters,
            *["gradient norm, clipping, optimizer state and master weights"] * section.chain,
            *["sums over replicas and updates"] * (section.slice_elements is not None),
            *["rows of products"] * section.rows,
            *["NaN and Inf"] * section.finite,
        ]
        yield f"parts of each step in turn: {', '.join(checks)}"
    if detects(file):
        policies = {policy for _, policy in file.sdc.policy}
        acts = {"halt": "the run halts", "repair": "the step is repaired, or else the run halts"}
        known = acts.get(next(iter(policies))) if len(policies) == 1 else None
        yield f"after a finding {known or 'what sdc.policy says'}"
    if interval := file.checkpoint.interval:
        yield f"checkpoints every {interval} steps{', verified' if audit.enabled and audit.verify_checkpoints else ''}"
    if memory.interval:
        at = "" if memory.partners is False or hosts == 1 else " and of another host"
        at += ", from two hosts on" if at and hosts is None else ""
        yield f"snapshots every {memory.interval} steps in the memory of the host{at}"
    if file.health.enabled is not False and file.study.mode is None:
        yield "hangs and stragglers" + (" where a launcher starts the ranks" if file.health.enabled is None else "")


def _cost(file: MegasdcSection, replicas: int | None) -> str:
    parts, sdc = [], file.sdc
    if sdc.always_on.enabled and sdc.always_on.coverage == "auto":
        most = {f"{sdc.budget_of(number):.2%}" for number in ((1, 2) if replicas is None else (replicas,))}
        which = "checks and audits" if file.audit.enabled else "checks"
        after_saves = file.audit.enabled and file.audit.verify_checkpoints and file.checkpoint.interval
        but = ", but for audits after checkpoints" if after_saves else ""
        parts.append(
            f"{which} at most {' to '.join(sorted(most))} of a step's time as measured, or else a warning{but}"
        )
    elif detects(file):
        parts.append("checks as often as they are asked for, with no limit")
    if file.checkpoint.memory.interval:
        parts.append("snapshots beside training, which waits while they are copied")
    return "; ".join(parts) or "nothing in a step"
