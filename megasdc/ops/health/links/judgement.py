"""Which links between hosts are slow: pairs against each other and against their own past; pure.

A figure is slow where it is ``RATIO`` times the usual one and more than a floor above it. Usual is the lower quartile
over all pairs: where one of three or four hosts is slow, half of the pairs or more are slow with it, and a median would
be theirs. Of a single pair, a round trip has nothing to be compared with but its own past.

Which way a delay lies is told without a common clock: a message's time of arrival on the other host's clock differs
from half a round trip by the difference of the two clocks, which is also known along other pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megasdc.ops.health.links.tcp_info import SentBytes

RATIO = 4.0
FLOOR_S = 1e-3
"""Least excess of a round trip, and of a transfer, in seconds."""
LOSS_FLOOR = 0.005
LEAST_RESENT = 5
ROUND_TRIPS = 8
"""Round trips that a transfer may contain, until TCP's window is open: no finding of their own where they are slow."""
ONE_WAY_SHARE = 0.6
"""A delay lies one way if the clocks show this share of it or more."""
LATENCY, BANDWIDTH, LOSS = "latency", "bandwidth", "loss"

Pair = tuple[str, str]


@dataclass(frozen=True)
class Direction:
    """Transfers one way.

    Args:
        seconds: of one payload and its answer, lower quartile of several.
        segments: TCP segments with data.
        resent: how many of them were sent again because they had not arrived.
    """

    seconds: float
    segments: int
    resent: int

    @property
    def loss(self) -> float:
        """Share of segments that were sent again."""
        return self.resent / self.segments if self.segments else 0.0


@dataclass(frozen=True)
class LinkFigures:
    """Measurements of a pair of hosts.

    Args:
        first, second: the hosts.
        rtt_s: round trip of a small message, lower quartile of several.
        skew_s: clock of ``second`` minus that of ``first``, plus half of what the way there takes longer than the way
            back.
        payload_bytes: of a transfer.
        forward: transfers from ``first`` to ``second``.
        backward: transfers from ``second`` to ``first``.
    """

    first: str
    second: str
    rtt_s: float
    skew_s: float
    payload_bytes: int
    forward: Direction
    backward: Direction

    @property
    def pair(self) -> Pair:
        """Both hosts."""
        return self.first, self.second

    def ways(self) -> dict[Pair, Direction]:
        """Transfers by (from, to)."""
        return {(self.first, self.second): self.forward, (self.second, self.first): self.backward}

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> LinkFigures:
        """From ``as_dict``'s values."""
        ways = {name: Direction(**said[name]) for name in ("forward", "backward")}
        return cls(**{**said, **ways})


@dataclass(frozen=True)
class SlowLink:
    """A pair of hosts that is slow.

    Args:
        first, second: the hosts.
        way: (from, to) where only one direction is slow; None: both, or not known.
        kinds: of ``LATENCY``, ``BANDWIDTH``, ``LOSS``.
        text: the figures.
    """

    first: str
    second: str
    way: Pair | None
    kinds: tuple[str, ...]
    text: str

    @property
    def pair(self) -> Pair:
        """Both hosts."""
        return self.first, self.second

    @property
    def place(self) -> str:
        """The pair, or its direction, in words."""
        return _both(*self.pair) if self.way is None else _one_way(*self.way)


def places_of(first: str, second: str) -> tuple[str, str, str]:
    """Every ``SlowLink.place`` of a pair."""
    return _both(first, second), _one_way(first, second), _one_way(second, first)


def _both(first: str, second: str) -> str:
    return f"{first} - {second}"


def _one_way(sender: str, receiver: str) -> str:
    return f"{sender} -> {receiver}"


def lower_quartile(values: Iterable[float]) -> float:
    """A value with a quarter of the others below it; of up to four the smallest."""
    order = sorted(values)
    return order[(len(order) - 1) // 4]


def median(values: Iterable[float]) -> float:
    """The middle value; of an even number the smaller of the two."""
    order = sorted(values)
    return order[(len(order) - 1) // 2]


def combined(figures: Sequence[LinkFigures]) -> LinkFigures:
    """Several measurements of a pair, oldest first, as one: medians, sums of segments, and the last clocks."""
    last = figures[-1]
    ways = []
    for name in ("forward", "backward"):
        own: list[Direction] = [getattr(one, name) for one in figures]
        counts = sum(one.segments for one in own), sum(one.resent for one in own)
        ways.append(Direction(median(one.seconds for one in own), *counts))
    rtt_s = median(one.rtt_s for one in figures)
    return LinkFigures(last.first, last.second, rtt_s, last.skew_s, last.payload_bytes, *ways)


def judge_links(
    figures: Sequence[LinkFigures],
    past: Mapping[Pair, LinkFigures] | None = None,
    lossy: Mapping[Pair, SentBytes] | None = None,
) -> list[SlowLink]:
    """The slow ones among pairs of hosts, each pair once.

    Args:
        figures: of each pair, of equal payloads.
        past: what was usual of a pair before, where that is known.
        lossy: directions that lose what a run itself sends, with its counts (``megasdc.ops.health.links.watch``).
    """
    past, lossy = past or {}, lossy or {}
    late = {one.pair: usual for one in figures if _is_slow(one.rtt_s, usual := _usual_rtt(one, figures, past))}
    clocks = _clocks([one for one in figures if one.pair not in late])
    found = [_judge(one, figures, past, late.get(one.pair), clocks, lossy) for one in figures]
    return [one for one in found if one is not None]


def _is_slow(value: float, usual: float) -> bool:
    return value > RATIO * usual and value > usual + FLOOR_S


def _usual_rtt(own: LinkFigures, figures: Sequence[LinkFigures], past: Mapping[Pair, LinkFigures]) -> float:
    before = [past[own.pair].rtt_s] if own.pair in past else []
    return min([lower_quartile(one.rtt_s for one in figures), *before])


def _usual_s(own: LinkFigures, way: Pair, figures: Sequence[LinkFigures], past: Mapping[Pair, LinkFigures]) -> float:
    before = [past[own.pair].ways()[way].seconds] if own.pair in past else []
    return min([lower_quartile(each.seconds for one in figures for each in one.ways().values()), *before])


def _usual_loss(figures: Sequence[LinkFigures]) -> float:
    """Of all directions; a single pair is judged by ``LOSS_FLOOR`` alone: losses both ways do not excuse each other."""
    return lower_quartile(way.loss for one in figures for way in one.ways().values()) if len(figures) > 1 else 0.0


def _judge(
    own: LinkFigures,
    figures: Sequence[LinkFigures],
    past: Mapping[Pair, LinkFigures],
    usual_rtt: float | None,
    clocks: Mapping[str, tuple[int, float]],
    lost: Mapping[Pair, SentBytes],
) -> SlowLink | None:
    """A pair's finding; ``usual_rtt``: None where its round trip is not slow."""
    texts, ways, kinds = [], set(), []
    usual_loss = _usual_loss(figures)
    times = {way: (each.seconds, _usual_s(own, way, figures, past)) for way, each in own.ways().items()}
    if usual_rtt is not None:
        kinds.append(LATENCY)
        ways |= _way_of_delay(own, own.rtt_s - usual_rtt, clocks)
        texts.append(f"round trip {_ms(own.rtt_s)}, usual {_ms(usual_rtt)}")
    round_trips_s = 0.0 if usual_rtt is None else ROUND_TRIPS * (own.rtt_s - usual_rtt)
    slow = {way for way, (seconds, usual) in times.items() if _is_slow(seconds - round_trips_s, usual)}
    for way in sorted(slow):
        seconds, usual = times[way]
        rates = [f"{own.payload_bytes / one / 1e6:,.1f}" for one in (seconds, usual)]
        texts.append(f"{rates[0]} MB/s from {way[0]} to {way[1]}, usual {rates[1]} MB/s")
    kinds += [BANDWIDTH] if slow else []
    lossy = {way for way, each in own.ways().items() if way in lost or _is_lossy(each, usual_loss)}
    for way in sorted(lossy):
        each = own.ways()[way]
        resent, segments = (lost[way].lost, lost[way].segments) if way in lost else (each.resent, each.segments)
        texts.append(f"{resent:,} of {segments:,} segments from {way[0]} to {way[1]} sent again")
    kinds += [LOSS] if lossy else []
    ways |= slow | lossy
    if not kinds:
        return None
    return SlowLink(*own.pair, next(iter(ways)) if len(ways) == 1 else None, tuple(kinds), "; ".join(texts))


def _is_lossy(each: Direction, usual: float) -> bool:
    return each.resent >= LEAST_RESENT and each.loss > LOSS_FLOOR and each.loss > RATIO * usual


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


def _clocks(figures: Sequence[LinkFigures]) -> dict[str, tuple[int, float]]:
    """Clocks of hosts that pairs connect: number of the connected set, and seconds against its first host's clock."""
    near: dict[str, dict[str, float]] = {}
    for one in figures:
        near.setdefault(one.first, {})[one.second] = one.skew_s
        near.setdefault(one.second, {})[one.first] = -one.skew_s
    clocks: dict[str, tuple[int, float]] = {}
    for number, start in enumerate(near):
        clocks.setdefault(start, (number, 0.0))
        queue = deque([start])
        while queue:
            host = queue.popleft()
            of, seconds = clocks[host]
            for other, skew in near[host].items():
                if other not in clocks:
                    clocks[other] = of, seconds + skew
                    queue.append(other)
    return clocks


def _way_of_delay(own: LinkFigures, excess_s: float, clocks: Mapping[str, tuple[int, float]]) -> set[Pair]:
    """The directions that a delay lies in, as far as the clocks along other pairs show it."""
    both = {(own.first, own.second), (own.second, own.first)}
    if own.first not in clocks or own.second not in clocks or clocks[own.first][0] != clocks[own.second][0]:
        return both
    difference = clocks[own.second][1] - clocks[own.first][1]
    longer_s = 2 * (own.skew_s - difference)
    if abs(longer_s) < ONE_WAY_SHARE * excess_s:
        return both
    return {(own.first, own.second) if longer_s > 0 else (own.second, own.first)}


def name_places(slow: Sequence[SlowLink]) -> dict[str, list[SlowLink]]:
    """What to look at, with the slow pairs behind it: the host that several slow pairs share, or the pair."""
    named: dict[str, list[SlowLink]] = {}
    for part in _connected(slow):
        shared = set.intersection(*(set(one.pair) for one in part))
        if len(part) > 1 and len(shared) == 1:
            named[shared.pop()] = part
        else:
            named |= {one.place: [one] for one in part}
    return named


def _connected(slow: Sequence[SlowLink]) -> list[list[SlowLink]]:
    parts: list[list[SlowLink]] = []
    for one in slow:
        touched = [part for part in parts if any(set(one.pair) & set(other.pair) for other in part)]
        parts = [part for part in parts if part not in touched]
        parts.append([other for part in touched for other in part] + [one])
    return parts
