"""Section `supervise`: how many hosts a run uses when it is supervised, and when a person is needed."""

from __future__ import annotations

from megasdc.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    asks,
    setting,
    tunes,
)

_TESTS = "supervise.returns or supervise.spare_test_s or supervise.ledger"
"""What tests hosts."""


class SuperviseSection(Section):
    """What `megasdc supervise` does with failures; other starts do not read it."""

    at_resume = "-"

    num_hosts: PositiveInt | None = setting(
        None,
        "Hosts that the run uses, the first of the hostfile or of the SLURM job; the others are spares. null: all, and "
        "no spare.",
    )
    min_hosts: PositiveInt | None = setting(
        None,
        "With so many hosts at least the run goes on where others are lacking: with fewer replicas, the same samples a "
        "step, and with all again once they can be used. Needs shared storage. null: never with fewer than "
        "`num_hosts`.",
    )
    failures_per_hour: PositiveInt = setting(20, "More failures within an hour end the run.")
    without_progress: PositiveInt = setting(
        50, "So many failures after the first one that got no further than that end the run."
    )
    failed_starts: PositiveInt = setting(
        10,
        "So many starts in succession that fail before a step end the run; lost hosts and processes that were killed "
        "from outside do not count.",
    )
    same_step: PositiveInt = setting(
        3,
        "So many failures of one kind in succession at one step that each attempt reached itself, not all on the same "
        "hosts, end the run: it is no hardware. Lost hosts and processes that were killed from outside do not count.",
    )
    pause_s: NonNegativeFloat = setting(
        5.0, "Seconds before an attempt is repeated where the one before got no further; doubled each time."
    )
    longest_pause_s: NonNegativeFloat = setting(300.0, "The longest such pause.")
    returns: NonNegativeInt = setting(
        1,
        "Times that a host which was replaced becomes a spare again after it has passed a test by `megasdc stress`; 0: "
        "replaced hosts are not tested.",
    )
    test_rounds: PositiveInt = setting(3, "Rounds of such a test.", needs=tunes(_TESTS))
    golden: str | None = setting(
        None,
        "Folder of golden values for the test; null: a host is compared with itself alone, so that what it always "
        "computes wrong is not found.",
        needs=asks(_TESTS),
        min_length=1,
    )
    retest_s: PositiveFloat = setting(
        300.0, "Seconds until a host that could not be tested is tested again.", needs=tunes(_TESTS)
    )
    spare_test_s: NonNegativeFloat = setting(
        3600.0, "Seconds between tests of a host that waits as a spare, the first when the run begins; 0: none."
    )
    ledger: str | None = setting(
        None,
        "File in which all runs of a cluster keep how often each host has failed; hosts that failed much more often "
        "than others are not used before they have passed a test. null: nothing is kept.",
        min_length=1,
    )
    ledger_days: PositiveFloat = setting(
        30.0, "What is older in the ledger does not count.", needs=tunes("supervise.ledger")
    )
    rewind_steps: NonNegativeInt = setting(
        0,
        "Where NaN and Inf come again after a restart: go back to a checkpoint at least so many steps before the first "
        "of them, and never train on the samples from there to the last of them; 0: the run ends, no data are skipped.",
    )
    rewinds: NonNegativeInt = setting(
        3, "Times that a run goes back, for that or because a checkpoint cannot be loaded; 0: it ends instead."
    )
