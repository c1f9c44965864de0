"""Are runs with bounds and faults scored against the right partners, and does the sentence say what the numbers say?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megasdc.common.errors import ConfigError
from tools.bench.bounds.gradient_sizes import SizeHistogram
from tools.bench.bounds.options import BoundTrainOptions, Setting
from tools.bench.bounds.training import fault_specs
from tools.bench.bounds.training_scores import BoundRun, score
from tools.bench.bounds.training_verdict import verdict
from tools.bench.options import parse_numbers

ENTROPY = 5.0
NONE, TIGHT, LOOSE = Setting(), Setting("absolute", 1e-3, "tight"), Setting("spike_aware", 1e4, "loose")


def runs_of(setting, healthy, faulty):
    """Runs of seeds 1, 2, ... with these losses."""
    return [
        BoundRun(setting, seed, harmed, loss, 100, int(harmed), None if setting is NONE else 0.25, 7 * harmed, 1.0)
        for harmed, losses in ((False, healthy), (True, faulty))
        for seed, loss in enumerate(losses, 1)
    ]


def test_runs_are_compared_with_the_healthy_run_of_their_seed():
    """Worst case, worse cases, price and failures by hand; the largest loss is not the largest increase."""
    runs = runs_of(NONE, [2.0, 4.0, 3.0], [2.02, 4.01, 5.1]) + runs_of(TIGHT, [2.1, 4.0, 3.0], [2.1, 4.4, math.nan])
    none, tight = score(runs, ENTROPY)
    assert (none.worst, none.increase) == (2.02, pytest.approx(0.01))
    assert (none.worse, none.diverged, none.not_finite, none.price) == (1, 1, 0, None)
    assert (tight.worst, tight.increase) == (4.4, pytest.approx(0.1))
    assert (tight.worse, tight.diverged, tight.not_finite) == (1, 0, 1)
    assert tight.price == pytest.approx((0.05 + 0 + 0) / 3)
    assert tight.over_unbounded == pytest.approx(0.1)
    assert (tight.skipped, tight.skipped_healthy, tight.share, none.share) == (3, 0, 0.25, None)
    assert (tight.healthy, tight.faulty) == ((2.1, 4.0, 3.0), (2.1, 4.4))


def test_failed_runs_have_no_part_in_losses():
    """A setting all of whose runs fail has neither worst case nor price; an infinite loss is not "diverged"."""
    runs = runs_of(NONE, [2.0], [math.inf]) + runs_of(LOOSE, [5.5], [6.0])
    none, loose = score(runs, ENTROPY)
    assert (none.diverged, none.not_finite, none.worst) == (0, 1, None)
    assert (loose.failed_healthy, loose.diverged, loose.price, loose.healthy) == (1, 1, None, ())


HARMED = runs_of(NONE, [2.0, 2.0], [2.2, 5.5])
FAILING = (
    "Without a bound, faults change the final loss by at most +10.00 %, with 1 of 2 runs worse by more than 0.5 % and "
    "have 1 of 2 runs diverge or end without a finite loss; "
)
SEEDS_DIFFER = ", the most that losses of one setting differ between seeds"
SENTENCES = {
    "a bound helps": (
        [*HARMED, *runs_of(TIGHT, [2.1, 2.1], [2.1, 2.12]), *runs_of(LOOSE, [2.0, 2.0], [2.3, 5.5])],
        f"{FAILING}1 of the 2 bounds do better by more than 0.95 %{SEEDS_DIFFER}, the best of them, absolute 0.001 "
        "(tight), has its worst run at +6.00 % over the healthy one without a bound, at a price of +5.00 % on healthy "
        "runs; prices of all bounds on healthy runs are +0.00 % to +5.00 %; 2 seeds of one small model.",
    ),
    "none does": (
        [*HARMED, *runs_of(TIGHT, [2.1, 5.5], [2.3, 5.5])],
        f"{FAILING}none of the 1 bounds does better by more than 0.50 %; prices of all bounds on healthy runs are "
        "+5.00 % to +5.00 %, and 1 healthy runs with a bound failed.",
    ),
    "less than seeds differ is no help": (
        [*runs_of(NONE, [1.9, 2.1], [2.09, 2.31]), *runs_of(TIGHT, [1.9, 2.1], [1.9, 2.15])],
        "Without a bound, faults change the final loss by at most +10.00 %, with 2 of 2 runs worse by more than 0.5 %; "
        f"none of the 1 bounds does better by more than 12.35 %{SEEDS_DIFFER}; "
        "prices of all bounds on healthy runs are +0.00 % to +0.00 %.",
    ),
    "faults do no harm": (
        [*runs_of(NONE, [2.0, 2.0], [2.002, 1.99]), *runs_of(TIGHT, [2.0, 2.0], [2.0, 2.0])],
        "Without a bound, faults change the final loss by at most +0.10 %, with 0 of 2 runs worse by more than 0.5 %, "
        "so these runs cannot show what a bound is worth; prices of all bounds on healthy runs are +0.00 % to +0.00 %.",
    ),
    "nothing was learned": (
        runs_of(NONE, [2.0, 5.5], [2.0, 5.5]),
        "Nothing is shown: 1 of 2 healthy runs without a bound end above the entropy of token frequencies; take more "
        "steps or another learning rate.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_sentence_follows_the_numbers(case):
    """Each outcome has its own sentence; a bound that fails as often and ends farther away does not count as help."""
    runs, expected = SENTENCES[case]
    assert verdict(score(runs, ENTROPY), 2) == expected


def test_histogram_finds_quantiles():
    """What a share of all elements exceeds is NumPy's quantile within a bin and two digits; zeros and others count."""
    values = np.random.Generator(np.random.PCG64(3)).lognormal(-8, 3, 200_000)
    values[:50_000] = 0
    histogram = SizeHistogram()
    histogram.add(torch.from_numpy(values[:120_000]), 120_000)
    histogram.add(torch.from_numpy(values[120_000:]), 180_000)
    everything = np.concatenate([values, np.zeros(100_000)])
    for share in (0.1, 1e-2, 1e-4):
        assert histogram.exceeded_by(share) == pytest.approx(np.quantile(everything, 1 - share), rel=0.1)
    assert values.max() <= histogram.exceeded_by(0.0) <= 1.1 * values.max()


def test_options_are_checked_together():
    """Sizes out of range are reported in one error; thresholds are read from text."""
    with pytest.raises(ConfigError) as caught:
        BoundTrainOptions(steps=20, hidden=40, fault_probability=0.0, absolute=(-1.0,))
    assert len(caught.value.problems) == 4
    assert parse_numbers("--absolute", "2e-4, 1", "1") == (2e-4, 1.0)
    assert parse_numbers("--absolute", "", "1") == ()
    with pytest.raises(ConfigError, match="--absolute: '1;2' must be numbers"):
        parse_numbers("--absolute", "1;2", "1")


def test_faults_are_heavy_tailed_and_seeded():
    """Both signs of ten to the 1st up to the 12th, the larger the rarer, on one replica, all with the run's seed."""
    options = replace(BoundTrainOptions(), fault_probability=0.5)
    specs = fault_specs(options, 4)
    assert sorted(one["factor"] for one in specs) == sorted(s * 10.0**k for s in (1, -1) for k in range(1, 13))
    by_size = [one["probability"] for one in sorted(specs, key=lambda one: abs(one["factor"]))]
    assert by_size == sorted(by_size, reverse=True) and by_size[0] == 0.5 and by_size[-1] < 0.05
    assert {(one["phase"], one["replica"], one["seed"]) for one in specs} == {("collective", 1, 4)}
