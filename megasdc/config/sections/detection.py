"""Sections of the detection of silent data corruption in a run, and of the policy after a finding."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megasdc.config.fields import PositiveInt, Section, section

Policy = Literal["halt", "repair", "warn"]
Granularity = Literal["layer", "submodule", "gemm"]


class PolicySection(Section):
    """What happens after an exact finding, by verdict.

    halt: nothing is committed or saved, an incident report is written, and every rank exits with the corruption code.
    repair: all micro-batches of the step are recomputed, checked again, and used; halt if they are wrong again.
    warn: the step is committed as it is.
    """

    at_resume = "applied"

    persistent: Policy = Field("halt", description="The rank computes the same wrong value each time.")
    intermittent: Policy = Field("halt", description="The rank is wrong again, but not always or not equally.")
    not_reproduced: Policy = Field("repair", description="The rank was right in all repeats.")
    inconclusive: Policy = Field("halt", description="Ranks differ, but none can be named.")


class AlwaysOnSection(Section):
    """Checks of every step."""

    at_resume = "applied"

    enabled: bool = Field(False, description="Check every step; off: no hook is attached anywhere.")
    recompute: bool | None = Field(
        None,
        description="Compare forward results with those of the activation recompute on the same rank; null: where "
        "`pipeline.activation_checkpoint_interval` is set.",
    )
    parameters: bool = Field(
        True, description="Compare the parameters of all replicas after each step, before the next step is committed."
    )
    finite: bool = Field(
        True,
        description="Look for NaN and Inf in results, and name the submodule, rank and micro-batch where they appeared "
        "first.",
    )
    toleranced: bool = Field(
        False,
        description="Check gradient reduction, updates and gradient features within tolerances that are measured in "
        "the run; warns and may request an audit, never flags a rank.",
    )
    coverage: Literal["auto", "one", "all"] = Field(
        "auto",
        description="Micro-batches of a step whose results are checked: one, another each step; all; auto: all where "
        "that is expected to cost at most 1 % of a step on every rank, else one; reported at the start.",
    )
    granularity: Granularity = Field("submodule", description="Which submodules are checked; see `trace.granularity`.")


class SdcSection(Section):
    """Detection of silent data corruption: checks of every step, and what follows from any finding."""

    at_resume = "applied"

    always_on: AlwaysOnSection = section(AlwaysOnSection)
    repeats: PositiveInt = Field(
        5, description="How often a disputed micro-batch is recomputed to tell persistent from other faults."
    )
    golden: str | None = Field(
        None,
        min_length=1,
        description="Golden trace file that settles disputes and overrides the majority; null: verdicts are relative "
        "to the majority.",
    )
    golden_at_start: bool = Field(
        True,
        description="With `golden`: all ranks compute its workload before the first step of each start, so that a "
        "fault that all of them have in common is found; needs memory for a second model with its optimizer, for that "
        "time.",
    )
    golden_interval: PositiveInt | None = Field(
        None,
        description="With `golden`: steps from one such check to the next while training; null: none. The second model "
        "is then kept; how long a check takes is reported in the log and in the events `sdc/golden`.",
    )
    policy: PolicySection = section(PolicySection)


class AuditSection(Section):
    """Steps whose first micro-batch is the same on all replicas, so that every result of it can be compared."""

    at_resume = "applied"

    enabled: bool = Field(False, description="Audit every `interval` steps, on SIGUSR2 and on alarms.")
    interval: PositiveInt = Field(50, description="Steps K from one audit to the next.")
    granularity: Granularity = Field("gemm", description="Which submodules are compared; see `trace.granularity`.")
    verify_checkpoints: bool = Field(
        False, description="Also audit the step after each checkpoint, so that it is verified at once."
    )
