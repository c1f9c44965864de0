"""The preset `protect` of a guard: fields that one word stands for in a training that is not megasdc's own.

A run is expanded where its file is read (``megasdc.config.protect``); a guard when it is attached, since which checks
it can make is a matter of the engine. Before that, as in ``check-config --guard``, nothing forbids any. Fields that the
file gives win, and are refused where the engine forbids them, as without the word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megasdc.config.guard import GuardSettings
from megasdc.config.protect import (
    LONGEST_AUDIT_INTERVAL,
    SLICE_ELEMENTS,
    VERDICTS,
    Gap,
    fitting_fields,
    overridden,
    protection_lines,
    put,
)
from megasdc.config.schema import value_of
from megasdc.config.sections import OFF, STRICT

SLICES = "sdc.always_on.slice_elements"
AUDIT_INTERVAL = 100
"""Steps from one audit to the next."""


class Obstacle(NamedTuple):
    """What forbids a check: why, and what is needed instead."""

    why: str
    needed: str

    @classmethod
    def of(cls, found: Sequence[Obstacle]) -> Obstacle | None:
        """All of them as one; None: there is none."""
        return cls(*(" and ".join(texts) for texts in zip(*found, strict=True))) if found else None


@dataclass(frozen=True)
class Conditions:
    """What decides which checks a guard can make; as it is before anything is known of a training: all of them.

    Args:
        replicas: number of replicas; None: not known.
        micro_batches: number of micro-batches of a step on a replica; None: not known.
        audits: what forbids audits; None: nothing, as in the following.
        slices: what forbids checks of slices of the optimizer.
        rows: what forbids sums of rows.
        deterministic: whether the program has PyTorch compute deterministically.
    """

    replicas: int | None = None
    micro_batches: int | None = None
    audits: Obstacle | None = None
    slices: Obstacle | None = None
    rows: Obstacle | None = None
    deterministic: bool = False

    @classmethod
    def of_ranks(cls, found: Sequence[Conditions]) -> Conditions:
        """Conditions of a whole training from those of its ranks: stages differ in layers, hosts in environments."""
        return replace(
            found[0],
            audits=next((one.audits for one in found if one.audits is not None), None),
            rows=None if any(one.rows is None for one in found) else found[0].rows,
            deterministic=all(one.deterministic for one in found),
        )


def expand(settings: GuardSettings, known: Conditions) -> GuardSettings:
    """The settings with the fields of their word that they do not give and the conditions allow."""
    given = settings.model_dump(mode="json", exclude_unset=True)
    fields = fitting_fields(settings, _wanted(settings, known), given, _checks_nothing)
    if not fields:
        return settings
    for path, value in fields.items():
        put(given, path, value)
    return GuardSettings.model_validate(given)


def _wanted(settings: GuardSettings, known: Conditions) -> dict[str, Any]:
    """Values that the word stands for, by path, as far as the conditions allow them.

    Who sets something of audits asks for them, and is told by an error what forbids them. An interval that is set
    stays.
    """
    if settings.protect == OFF:
        return {}
    asked = bool(settings.audit.model_fields_set - {"enabled"})
    wanted: dict[str, Any] = {
        "audit.enabled": known.audits is None or asked,
        "audit.interval": AUDIT_INTERVAL,
        "audit.longest_interval": None if "interval" in settings.audit.model_fields_set else LONGEST_AUDIT_INTERVAL,
        "audit.permuted": None if known.replicas is None else known.replicas == 1,
        "sdc.always_on.enabled": True,
        "sdc.always_on.parameters": known.replicas != 1,
        "sdc.always_on.rows": known.rows is None,
        SLICES: SLICE_ELEMENTS if known.slices is None else None,
        "sdc.budget": None,
        "sdc.referee": True,
        "nonfinite.enabled": True,
        "health.enabled": True,
    }
    wanted |= {f"sdc.policy.{name}": "halt" for name in VERDICTS}
    return wanted if settings.protect == STRICT else wanted | {"sdc.policy.not_reproduced": "warn"}


def _checks_nothing(settings: GuardSettings) -> bool:
    section = settings.sdc.always_on
    return section.enabled and not (section.parameters or section.rows or section.slice_elements is not None)


def guard_start_lines(settings: GuardSettings, known: Conditions) -> list[str]:
    """Lines on what expanded settings protect: covered, cost, not covered, and what is set in another way."""
    if settings.protect == OFF:
        return []
    return protection_lines(
        settings.protect,
        _covered(settings, known),
        _cost(settings, known),
        _find_gaps(settings, known),
        overridden(settings, _wanted(settings, known)),
    )


def _covered(settings: GuardSettings, known: Conditions) -> Iterator[str]:
    audit, section, sdc = settings.audit, settings.sdc.always_on, settings.sdc
    if whom := _compared(settings, known):
        what = "of" if audit.submodules is None else "of the submodules in audit.submodules,"
        when = f"in the first step and every {audit.intervals}"
        yield f"every result {what} a micro-batch compared bit by bit, {whom}, {when}"
    if section.enabled:
        parts = [
            *["rows of products"] * section.rows,
            *["sums over replicas, optimizer state and updates"] * (section.slice_elements is not None),
        ]
        yield from [f"parts of each step in turn: {', '.join(parts)}"] if parts else []
        yield from ["the parameters of all replicas in each step"] if _compares_parameters(settings, known) else []
    if settings.nonfinite.enabled:
        yield "NaN and Inf in each step"
    if sdc.golden is not None and not settings.golden.record:
        yield f"a golden trace in the first step and every {sdc.golden_interval}"
    if {action for _, action in sdc.policy} == {"halt"}:
        yield "after a finding all ranks end"
    elif sdc.policy.model_fields_set:
        yield "after a finding what sdc.policy says"
    else:
        yield "after a finding what can be put right is, or else all ranks end, but for what an audit finds only once"
    if whom:
        yield "checkpoints that were saved before an audit that agrees are verified by it"
    if settings.health.slow_ratio is not None and known.replicas != 1:
        yield "stragglers"
    if settings.health.enabled:
        yield "hangs where megasdc run starts the ranks"


def _compared(settings: GuardSettings, known: Conditions) -> str:
    """Whom audits compare, in words; empty: nobody."""
    audit = settings.audit
    if not audit.enabled:
        return ""
    if known.replicas is None:
        return "of all replicas" + (", or of one with itself" if audit.permuted is None else "")
    parts = ["of all replicas"] * (known.replicas > 1)
    parts += ["of each rank with itself"] * audit.permutes(known.replicas)
    return " and ".join(parts)


def _compares_parameters(settings: GuardSettings, known: Conditions) -> bool:
    section = settings.sdc.always_on
    return section.enabled and section.parameters and known.replicas != 1


def _cost(settings: GuardSettings, known: Conditions) -> str:
    audit, section, parts, thins = settings.audit, settings.sdc.always_on, list[str](), False
    if _compared(settings, known):
        times, most = 1 + audit.permutes(known.replicas or 2), audit.most_interval
        thins, share = most > audit.interval, ""
        if (number := known.micro_batches) is not None:
            least = f"{times / (number * most):.2%} to " * thins
            share = f", {least}{times / (number * audit.interval):.2%} of all"
        parts.append(f"{times} micro-batch{'es' * (times > 1)} more in {audit.intervals} steps{share}")
    looks = ["rows"] * section.rows + ["slices"] * (section.slice_elements is not None)
    if section.enabled and looks:
        replicas = (1, 2) if known.replicas is None else (known.replicas,)
        limit = " to ".join(sorted({f"{settings.sdc.budget_of(number):.2%}" for number in replicas}))
        told = f"{' and '.join(looks)}{', audits included,' * thins} at most {limit} of the time as measured"
        parts.append(f"{told}, one step in 50 looks at least")
    reads = ["the parameters"] * _compares_parameters(settings, known) + ["the gradients"] * settings.nonfinite.enabled
    if reads:
        parts.append(f"one read of {' and of '.join(reads)} a step")
    return "; ".join(parts) or "nothing in a step"


def _find_gaps(settings: GuardSettings, known: Conditions) -> Iterator[Gap]:
    """Yield what a guard does not cover, with what it would need."""
    audit, section = settings.audit, settings.sdc.always_on
    if not audit.enabled:
        yield Gap("results, but for sums of rows", *(known.audits or ("audit.enabled is false", "true")))
    elif known.replicas == 1:
        alone = "is compared with itself" if audit.permutes(1) else "has nothing to be compared with"
        yield Gap("audits and parameters against another replica", f"there is one, which {alone}", "two replicas")
    if not section.enabled and not (known.rows and known.slices):
        yield Gap("what happens between audits", "sdc.always_on.enabled is false", "true")
    else:
        if audit.enabled:
            what = "results between audits, but for sums of rows"
            yield Gap(what, "no other is computed twice", "a smaller audit.interval")
        parts = {
            "sdc.always_on.rows": ("sums of rows", known.rows, "true"),
            SLICES: ("sums over replicas and updates", known.slices, "a number of elements"),
        }
        if known.replicas != 1:
            parts["sdc.always_on.parameters"] = ("parameters between audits", None, "true")
        for path, (what, obstacle, wanted) in parts.items():
            if not (value := value_of(settings, path)) or not section.enabled:
                yield Gap(what, *(obstacle or (f"{path} is {'null' if value is None else 'false'}", wanted)))
    if not settings.nonfinite.enabled:
        yield Gap("NaN and Inf", "nonfinite.enabled is false", "true")
    if settings.sdc.golden is None:
        needed = "sdc.golden, recorded on trusted hosts with golden.record"
        yield Gap("faults that all replicas have in common", "there is no golden trace", needed)
    elif settings.golden.record:
        yield Gap("faults that all replicas have in common", "golden.record is true", "false, with the file as it is")
    if not (settings.determinism.enabled or known.deterministic):
        why = "neither determinism.enabled nor the program sets deterministic algorithms"
        yield Gap("whether another start has the same bits", why, "determinism.enabled, which takes other kernels")
