"""One sentence on a campaign on gradient bounds, made from its numbers and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tools.bench.bounds.training_scores import EPSILON, SettingScore

_EPSILON = f"{100 * EPSILON:g} %"


def percent(share: float | None) -> str:
    """A relative increase with its sign; None: there is none."""
    return "-" if share is None else f"{100 * share:+.2f} %"


def verdict(scores: Sequence[SettingScore], seeds: int) -> str:
    """The effect of faults without a bound, the bound that does best against them, and its price, as text.

    The best bound is the one with the fewest failed runs and, of those, the smallest worst loss against the healthy run
    without a bound: a bound that makes every run equally bad has not helped. Less than ``noise`` is no difference.
    """
    (none,) = [one for one in scores if one.setting.theta is None]
    bounded = [one for one in scores if one.setting.theta is not None]
    if none.failed_healthy:
        return (
            f"Nothing is shown: {none.failed_healthy} of {seeds} healthy runs without a bound end above the entropy of "
            "token frequencies; take more steps or another learning rate."
        )
    text = f"Without a bound, faults {_harm(none, seeds)}"
    if not bounded:
        return f"{text}; no bound was tried."
    if not _is_harmed(none):
        return f"{text}, so these runs cannot show what a bound is worth; {_prices(bounded)}."
    chance = noise(none, bounded)
    helpful = [one for one in bounded if _helps(one, none, chance)]
    more = f"better by more than {100 * chance:.2f} %"
    if chance > EPSILON:
        more += ", the most that losses of one setting differ between seeds"
    if not helpful:
        return f"{text}; none of the {len(bounded)} bounds does {more}; {_prices(bounded)}."
    best = min(helpful, key=_rank)
    return (
        f"{text}; {len(helpful)} of the {len(bounded)} bounds do {more}, the best of them, {best.setting.name}, has "
        f"its worst run at {_end(best)} over the healthy one without a bound, at a price of {percent(best.price)} on "
        f"healthy runs; {_prices(bounded)}; {seeds} seeds of one small model."
    )


def noise(none: SettingScore, bounded: Sequence[SettingScore]) -> float:
    """Relative difference of losses that may be chance: the largest over seeds within a setting.

    Faulty runs without a bound are not counted: their differences are the effect of faults.
    """
    groups = [none.healthy, *(losses for one in bounded for losses in (one.healthy, one.faulty))]
    return max([EPSILON, *((max(losses) - min(losses)) / fmean(losses) for losses in groups if losses)])


def failed(one: SettingScore) -> int:
    """Faulty runs that diverged or are not finite."""
    return one.diverged + one.not_finite


def _is_harmed(one: SettingScore) -> bool:
    return failed(one) > 0 or one.worse > 0


def _helps(one: SettingScore, none: SettingScore, chance: float) -> bool:
    """Whether a bound loses fewer runs than none does, or has a better worst run by more than chance."""
    (lost, end), (lost_without, end_without) = _rank(one), _rank(none)
    return lost < lost_without or (lost == lost_without and end < end_without - chance)


def _rank(one: SettingScore) -> tuple[int, float]:
    """The smaller, the better."""
    return failed(one) + one.failed_healthy, float("inf") if one.over_unbounded is None else one.over_unbounded


def _harm(one: SettingScore, seeds: int) -> str:
    said = []
    if one.increase is not None:
        said.append(
            f"change the final loss by at most {percent(one.increase)}, with {one.worse} of {seeds} runs worse by more "
            f"than {_EPSILON}"
        )
    if failed(one):
        said.append(f"have {failed(one)} of {seeds} runs diverge or end without a finite loss")
    return " and ".join(said)


def _end(one: SettingScore) -> str:
    assert one.over_unbounded is not None, "of the settings that rank before another, each has a loss"
    return percent(one.over_unbounded) + (f", {failed(one)} failed runs apart," if failed(one) else "")


def _prices(bounded: Sequence[SettingScore]) -> str:
    """The cost of bounds without faults."""
    prices = [one.price for one in bounded if one.price is not None]
    lost = sum(one.failed_healthy for one in bounded)
    said = (
        f"prices of all bounds on healthy runs are {percent(min(prices))} to {percent(max(prices))}" if prices else ""
    )
    if lost:
        said += f"{', and ' if said else ''}{lost} healthy runs with a bound failed"
    return said
