"""Sections of the detection of silent data corruption in a run, and of the policy after a finding."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megasdc.config.fields import PositiveInt, Section, asks, section, setting, tunes

Policy = Literal["halt", "isolate", "repair", "warn"]
UnnamedPolicy = Literal["halt", "repair", "warn"]
Granularity = Literal["layer", "submodule", "gemm"]
AUDITS, ALWAYS_ON = "audit.enabled", "sdc.always_on.enabled"
CHECKS = f"{AUDITS} or {ALWAYS_ON} or sdc.golden"
"""Settings of which at least one must be on for a finding, in the form of `Needs.settings`."""
ISOLATES = " or ".join(f'sdc.policy.{name}="isolate"' for name in ("persistent", "intermittent", "not_reproduced"))
TRAINING, EXTRA = "training", "extra"
"""Micro-batch that an audit compares: the first of the step, or an extra one outside the step."""


class PolicySection(Section):
    """Actions after an exact finding, by verdict.

    halt: nothing is committed or saved, an incident report is written, and every rank exits with the corruption code.
    isolate: likewise, but the other replicas go on in the same processes, without the one that is wrong; `isolation`.
    repair: all micro-batches of the step are recomputed, checked again, and used; halt if they are wrong again.
    warn: the step is committed as it is.
    """

    at_resume = "applied"
    needs = asks(CHECKS)

    persistent: Policy = setting("halt", "The rank computes the same wrong value each time.")
    intermittent: Policy = setting("halt", "The rank is wrong again, but not always or not equally.")
    not_reproduced: Policy = setting("repair", "The rank was right in all repeats.")
    inconclusive: UnnamedPolicy = setting("halt", "Ranks differ, but none can be named.")

    @property
    def isolating(self) -> list[str]:
        """Verdicts after which the replica is isolated."""
        return [name for name, policy in self if policy == "isolate"]


class IsolationSection(Section):
    """Limits of a run that continues without replicas that were found wrong, where `policy` is to isolate them."""

    at_resume = "applied"
    needs = tunes(ISOLATES)

    min_replicas: int = setting(2, "Fewest replicas that go on; where fewer would be left the run is halted.", ge=2)
    max_steps: PositiveInt | None = setting(
        None, "Save, and end with the corruption code, after so many steps without a replica; null: no limit."
    )


class StepChecksSection(Section):
    """Checks of every step that a guard can make, too."""

    enabled: bool = setting(False, "Check every step; off: no hook is attached anywhere.")
    parameters: bool = setting(
        True, "Compare the parameters of all replicas after each step, before the next step is committed."
    )
    slice_elements: PositiveInt | None = setting(
        None,
        "Elements of each shard of the optimizer of which the gradient's sum over replicas, the state since the last "
        "step and the update are checked in each look, others each time until all have been; as many as the shard has, "
        "or more: what was wrong once can be repaired; null: none.",
    )
    rows: bool = setting(
        False,
        "Sum the rows of one product of a linear layer (output, or gradient of input or weight) in each step that "
        "looks, another one each time; a row that is off is computed in fp64, and names its rank.",
    )


class AlwaysOnSection(StepChecksSection):
    """Checks of every step."""

    at_resume = "applied"
    needs = asks(ALWAYS_ON)

    recompute: bool | None = setting(
        None,
        "Compare forward results with those of the activation recompute on the same rank; null: where "
        "`pipeline.activation_checkpoint_interval` is set.",
    )
    chain: bool = setting(
        True,
        "Check the links from the reduced gradient to the parameters: norm and clip factors of all ranks in each step; "
        "in steps that look each rank's part of the norm, a part of the masters and moments since the last step, and a "
        "part of the gathered parameters against their masters, others each time until all have been.",
    )
    finite: bool = setting(
        True, "Look for NaN and Inf in results, and name the submodule, rank and micro-batch where they appeared first."
    )
    tokens: bool = setting(
        True,
        "Compare tokens, labels and loss mask of micro-batches, as the model was given them, with the file, which is "
        "read again, its blocks' checksums too.",
    )
    coverage: Literal["auto", "one", "all"] = setting(
        "auto",
        "Micro-batches whose results are looked at: one of each step, another each step; all, and with `chain` every "
        "block of gradient, state and parameters in each step, but none of the gradient with "
        "`zero_optimization.offload_optimizer`; auto: as many as `sdc.budget` leaves room for, from all of each step "
        "to one in 50 steps; reported at the start.",
    )
    granularity: Granularity = setting(
        "submodule", "Which submodules are checked; see `trace.granularity`.", needs=tunes(ALWAYS_ON)
    )


class ChecksSection(Section):
    """Cost and repeats of checks, of a guard's too."""

    budget: float | None = setting(
        None,
        "Largest share of a step's time that checks may take, of a run with coverage auto its audits too, which how "
        "much they look at follows while the training goes on; null: 0.01, with one replica 0.02.",
        needs=tunes(ALWAYS_ON),
        gt=0,
        le=1,
    )
    repeats: PositiveInt = setting(
        5, "How often a disputed micro-batch is recomputed to tell persistent from other faults.", needs=tunes(CHECKS)
    )

    def budget_of(self, replicas: int) -> float:
        """``budget``, or its default for a number of replicas."""
        return self.budget or (0.02 if replicas == 1 else 0.01)


class SdcSection(ChecksSection):
    """Detection of silent data corruption: checks of every step, and what follows from any finding."""

    at_resume = "applied"

    always_on: AlwaysOnSection = section(AlwaysOnSection)
    golden: str | None = setting(
        None,
        "Golden trace file that settles disputes and overrides the majority; null: where the referee does not decide, "
        "verdicts are relative to the majority.",
        needs=asks("determinism.enabled", f"{AUDITS} or {ALWAYS_ON} or sdc.golden_at_start or sdc.golden_interval"),
        min_length=1,
    )
    golden_at_start: bool = setting(
        True,
        "With `golden`: all ranks compute its workload before the first step of each start, so that a fault that all "
        "of them have in common is found; needs memory for a second model with its optimizer, for that time.",
        needs=asks("sdc.golden"),
    )
    golden_interval: PositiveInt | None = setting(
        None,
        "With `golden`: steps from one such check to the next while training; null: none. The second model is then "
        "kept; how long a check takes is reported in the log and in the events `sdc/golden`.",
        needs=asks("determinism.enabled", "sdc.golden"),
    )
    policy: PolicySection = section(PolicySection)
    isolation: IsolationSection = section(IsolationSection)

    def record_command(self, config: Path, overrides: Iterable[str] = ()) -> str:
        """Command line that records the golden trace of a configuration file."""
        words = ["megasdc", "golden", "record", "--config", str(config), "--out", str(self.golden)]
        for override in overrides:
            words += [] if override.startswith("megasdc.sdc.golden=") else ["--set", override]
        return shlex.join(words)


class AuditTimes:
    """What follows from the fields of audits that runs and guards have."""

    if TYPE_CHECKING:
        interval: PositiveInt
        permuted: bool | None
        longest_interval: PositiveInt | None

    def permutes(self, replicas: int) -> bool:
        """Whether so many replicas compute audited micro-batches with elements in other places, too."""
        return replicas == 1 if self.permuted is None else self.permuted

    @property
    def most_interval(self) -> int:
        """Largest number of steps from one audit to the next."""
        return max(self.interval, self.longest_interval or 0)

    @property
    def intervals(self) -> str:
        """Text on the number of steps from one audit to the next."""
        return f"{self.interval}" + (f" to {self.most_interval}" if self.most_interval > self.interval else "")


class AuditSection(AuditTimes, Section):
    """Steps in which all replicas compute the same micro-batch, so that every result of it can be compared.

    The first step of each start is audited by an extra one, too. With ``permuted`` each rank also compares it with
    itself.
    """

    at_resume = "applied"
    needs = tunes(AUDITS)

    enabled: bool = setting(False, "Audit every `interval` steps, and on SIGUSR2.")
    interval: PositiveInt = setting(50, "Steps K from one audit to the next.")
    micro_batch: Literal["training", "extra"] = setting(
        TRAINING,
        "training: the first micro-batch of the step is that of one replica on all, and its gradient is used, which "
        "takes up to 1/(M K) of the independent samples; extra: one more micro-batch, whose gradient is thrown away, "
        "so that audits change no bit of the training, for 1/(M K) more compute.",
    )
    granularity: Granularity = setting("gemm", "Which submodules are compared; see `trace.granularity`.")
    verify_checkpoints: bool = setting(
        False,
        "Also audit the step after each checkpoint, and what the run ends with, so that each is verified at once.",
        needs=asks(AUDITS),
    )
    permuted: bool | None = setting(
        False,
        "Also compute the audited micro-batch once more on each rank with the elements of all operations in other "
        "places, which finds a unit that is wrong each time; audits of one replica need it; null: where the run has "
        "one replica.",
        needs=asks(AUDITS),
    )
    longest_interval: PositiveInt | None = setting(
        None,
        "Steps up to which `interval` is doubled while audits take more than half of `sdc.budget`; those after "
        "checkpoints stay; null: it never is.",
        needs=asks(AUDITS, f'audit.micro_batch="{EXTRA}"', ALWAYS_ON, 'sdc.always_on.coverage="auto"'),
    )

    def is_due(self, step: int, save_interval: int, factor: int = 1) -> bool:
        """Whether a step is audited because of its number.

        Args:
            save_interval: number of steps between checkpoints; 0: no checkpoints.
            factor: number by which ``interval`` is multiplied now.
        """
        after_save = self.verify_checkpoints and save_interval and step > 1 and (step - 1) % save_interval == 0
        return self.enabled and bool(step % (self.interval * factor) == 0 or after_save)

    def source(self, step: int, replicas: int, factor: int = 1) -> int:
        """Number of the replica whose first micro-batch all replicas compute in an audited step; they take turns."""
        return step // (self.interval * factor) % replicas
