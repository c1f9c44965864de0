"""Links between the hosts of a run: small measurements at an interval of steps, judged on rank 0.

They go over TCP connections of their own on the host network, by the route to the launch's first host. Of the
connections that carry training it is counted how many segments were sent again. Over NCCL the gradients may take
another network, which is not measured.

TCP connections between pairs of ranks, over which the links of their hosts are measured.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megasdc.common.wire import SECRET_BYTES, Door, connect
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health.links.judgement import Direction, LinkFigures, Pair, SlowLink, name_places
from megasdc.ops.health.links.own_connections import SentToHosts, hosts_by_address, own_connections
from megasdc.ops.health.links.probe import ProbePlan, follow, lead
from megasdc.ops.health.links.rings import RankPair, in_turns, ring_pairs, rings
from megasdc.ops.health.links.tcp_info import SentBytes
from megasdc.ops.health.links.watch import LinkWatch
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.rendezvous import own_address_for_ranks

CONNECT_S = 5.0
"""Seconds that a connection may take to be made: one that a firewall drops holds up the start for so long."""


@dataclass(frozen=True)
class _Place:
    """Where a rank listens; ``token``: the secret that its peers know."""

    address: str
    port: int
    token: bytes = field(repr=False)


def connect_pairs(
    pairs: Sequence[RankPair], rank: int, hosts: Sequence[str], group: dist.ProcessGroup
) -> tuple[dict[int, socket.socket], dict[RankPair, str]]:
    """Connect the ranks of pairs, the first to the second.

    Ranks listen on the address by which they reach the launch's first host, until their peers have come.

    Args:
        rank: this one.
        hosts: names of the ranks' hosts.

    Returns:
        This rank's connections by the other rank, and what failed, the same on all ranks.

    Collective: all ranks of the group.
    """
    following = [pair for pair in pairs if pair[1] == rank]
    door, own = _open(hosts[first] for first, _ in following) if following else (None, "")
    places = gather_objects(own, group)
    connections: dict[int, socket.socket] = {}
    failed: dict[RankPair, str] = {}
    for pair in pairs:
        if pair[0] == rank:
            try:
                connections[pair[1]] = _enter(places[pair[1]], rank)
            except OSError as error:
                failed[pair] = f"rank {pair[1]} cannot be reached: {error}"
    failed = _gathered(failed, group)  # who has connected waits in the other's queue
    if door is not None:
        expected = {pair[0] for pair in following if pair not in failed}
        with door:
            connections |= _admit(door, expected)
        failed |= {pair: "it did not connect" for pair in following if pair[0] not in connections}
    return connections, _gathered(failed, group)


def _open(callers: Iterable[str]) -> tuple[Door | None, _Place | str]:
    """Listen for ranks of other hosts; returns where, or in a sentence why that is not possible."""
    token = secrets.token_bytes(SECRET_BYTES)
    try:
        address = own_address_for_ranks(*callers)
        door = Door(address, token)
    except OSError as error:
        return None, f"it cannot listen on the route to the first host: {error}"
    return door, _Place(address, door.port, token)


def _enter(place: _Place | str, rank: int) -> socket.socket:
    """Connect as this rank.

    Raises:
        OSError: it was not possible, or nobody listens.
    """
    if isinstance(place, str):
        raise ConnectionError(place)
    try:
        return connect(place.address, place.port, place.token, {"rank": rank}, CONNECT_S)
    except OSError as error:
        raise ConnectionError(f"{place.address} port {place.port}: {error}") from error


def _admit(door: Door, expected: Collection[int]) -> dict[int, socket.socket]:
    """Connections by the rank that made them, those that came in time."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(expected):
        try:
            hello, connection = door.accept(CONNECT_S)
        except TimeoutError:
            break  # it is reported as not connected
        first = hello.get("rank")
        if isinstance(first, int) and first in expected and first not in found:
            found[first] = connection
        else:
            connection.close()
    return found


def _gathered(failed: dict[RankPair, str], group: dist.ProcessGroup) -> dict[RankPair, str]:
    """What failed on any rank; where both ends tell it, by the lower rank."""
    return {pair: said[pair] for said in reversed(gather_objects(failed, group)) for pair in said}


logger = logging.getLogger(__name__)

PLAN = ProbePlan(pings=10, transfers=4, payload_bytes=1 << 18)
MEASURE_S = 5.0
"""Seconds that a measurement of a pair may take, a thousand times what it takes: all ranks wait for its end."""
LOST = f"it was not measured within {MEASURE_S:g} s, or the connection broke"
_FORWARD, _BACKWARD, _COLUMNS = 9, 11, 13
"""Columns of a pair's row: ``_row``, then segments and segments sent again of what is carried one way and the other."""


class LinkPings(Hook):
    """Measures a link for each pair of hosts that are neighbours in a data or pipeline ring.

    Args:
        interval: steps between measurements.
        writer: of metrics, on rank 0 alone.

    Collective: all ranks of the run.
    """

    def __init__(self, interval: int, run: Run, writer: MetricsWriter | None) -> None:
        self._interval, self._writer, self._run = interval, writer, run
        dims, connections = run.dims, own_connections()
        own = socket.gethostname(), sorted({one.local for one in connections})
        self._hosts, addresses = zip(*gather_objects(own, run.host_group), strict=True)
        pairs = ring_pairs(rings(dims.tensor, dims.pipeline, dims.data), self._hosts)
        self._watch = LinkWatch()
        self._connections: dict[int, socket.socket] = {}
        lost: dict[RankPair, str] = {}
        if pairs:
            self._connections, lost = connect_pairs(pairs, dims.rank, self._hosts, run.host_group)
        self._set_pairs([pair for pair in pairs if pair not in lost])
        known = hosts_by_address(addresses, self._hosts).items()
        self._sent = SentToHosts(connections, {address: host for address, host in known if host in self._columns})
        self._drop(lost)
        if dims.rank == 0 and len(set(self._hosts)) > 1:
            logger.info(
                "links: %d pairs of hosts are measured every %d steps; ranks of one host are not. What rank 0 sends to "
                "them over %d connections of training is counted",
                len(self._pairs),
                interval,
                len(self._sent),
            )

    def after_step(self, run: Run, result: StepResult) -> None:
        """Measure all links, and report those that became slow or no longer are."""
        if not self._pairs or run.step % self._interval:
            return
        began = time.perf_counter()
        table = torch.zeros((len(self._pairs), _COLUMNS), dtype=torch.float64)
        self._count_sent(table)
        for turn in self._turns:
            dist.barrier(group=run.host_group)  # both ends of a pair begin together, also after a turn that took long
            for pair in turn:
                if run.dims.rank in pair:
                    self._measure(pair, table)
        dist.all_reduce(table, group=run.host_group)
        rows = dict(zip(self._pairs, table.tolist(), strict=True))
        lost = {pair: LOST for pair, row in rows.items() if not row[0]}
        if run.dims.rank == 0:
            measured = {pair: row for pair, row in rows.items() if pair not in lost}
            carried: dict[Pair, SentBytes] = {}
            for pair, row in measured.items():
                carried |= self._carried(pair, row)
            self._judge([self._figures(pair, row) for pair, row in measured.items()], carried)
        if lost:
            self._drop(lost)
            self._set_pairs([pair for pair in self._pairs if pair not in lost])
        run.progress.paused_s += time.perf_counter() - began

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    def _set_pairs(self, pairs: Sequence[RankPair]) -> None:
        """Measure these pairs from now on."""
        self._pairs, self._turns = pairs, in_turns(pairs, self._hosts)
        own = self._hosts[self._run.dims.rank]
        self._columns: dict[str, tuple[int, int]] = {}
        """Row and first column of what this host sends to another, by the other."""
        for row, (first, second) in enumerate(pairs):
            if own == self._hosts[first]:
                self._columns[self._hosts[second]] = row, _FORWARD
            elif own == self._hosts[second]:
                self._columns[self._hosts[first]] = row, _BACKWARD

    def _count_sent(self, table: torch.Tensor) -> None:
        """Add what this rank's connections have sent; each rank of a host does so."""
        for host, sent in self._sent.pop_sent().items():
            if host in self._columns:
                row, way = self._columns[host]
                table[row, way : way + 2] = torch.tensor([sent.segments, sent.lost])

    def _measure(self, pair: RankPair, table: torch.Tensor) -> None:
        """This rank's end of a measurement; the first rank writes it into its row."""
        other = pair[1] if self._run.dims.rank == pair[0] else pair[0]
        try:
            if other == pair[0]:
                follow(self._connections[other], PLAN, MEASURE_S)
            else:
                first, second = (self._hosts[rank] for rank in pair)
                found = lead(self._connections[other], PLAN, first, second, MEASURE_S)
                table[self._pairs.index(pair), :_FORWARD] = torch.tensor(_row(found), dtype=torch.float64)
        except OSError as error:
            logger.warning("link with rank %d on %s: %s", other, self._hosts[other], error)
            self._connections[other].close()  # so that the other end does not wait

    def _figures(self, pair: RankPair, row: Sequence[float]) -> LinkFigures:
        first, second = (self._hosts[rank] for rank in pair)
        there, back = (Direction(row[at], int(row[at + 1]), int(row[at + 2])) for at in (3, 6))
        return LinkFigures(first, second, row[1], row[2], PLAN.payload_bytes, there, back)

    def _carried(self, pair: RankPair, row: Sequence[float]) -> dict[Pair, SentBytes]:
        """What training has sent between the hosts of a pair."""
        first, second = (self._hosts[rank] for rank in pair)
        there, back = (SentBytes(int(row[at]), int(row[at + 1])) for at in (_FORWARD, _BACKWARD))
        return {(first, second): there, (second, first): back}

    def _judge(self, figures: Sequence[LinkFigures], carried: Mapping[Pair, SentBytes]) -> None:
        """Emit events of what changed; on rank 0."""
        run = self._run
        if self._writer is not None and figures:
            metrics = {"health/ping_ms": 1e3 * max(one.rtt_s for one in figures)}
            if counted := [one.loss for one in carried.values() if one.segments]:
                metrics["health/resent_share"] = max(counted)
            self._writer.write(run.step, metrics)
        begun, ended = self._watch.update(figures, carried)
        for place, found in name_places(list(self._watch.slow.values())).items():
            if any(one in begun for one in found):
                self._report(place, found)
        for one in ended:
            logger.warning("link %s is no longer slow", one.place)
            run.events.emit("health", "link_recovered", step=run.step, place=one.place, hosts=one.pair)

    def _report(self, place: str, found: Sequence[SlowLink]) -> None:
        pairs = [{"place": one.place, "kinds": one.kinds, "text": one.text} for one in found]
        texts = [one.text if one.place == place else f"{one.place}: {one.text}" for one in found]
        logger.warning("slow link %s: %s", place, "; ".join(texts))
        hosts = sorted({host for one in found for host in one.pair})
        self._run.events.emit("health", "slow_link", step=self._run.step, place=place, hosts=hosts, pairs=pairs)

    def _drop(self, lost: dict[RankPair, str]) -> None:
        """Measure these pairs no more."""
        for pair, problem in lost.items():
            for rank in pair:
                if self._run.dims.rank in pair and rank in self._connections:
                    self._connections.pop(rank).close()
            if self._run.dims.rank == 0:
                first, second = (self._hosts[rank] for rank in pair)
                self._watch.slow.pop((first, second), None)
                logger.warning("link between %s and %s is not measured: %s", first, second, problem)
                self._run.events.emit(
                    "health", "link_unmeasured", step=self._run.step, hosts=[first, second], problem=problem
                )


def _row(found: LinkFigures) -> list[float]:
    """A measurement as numbers; zeros where there is none."""
    ways = [(way.seconds, way.segments, way.resent) for way in (found.forward, found.backward)]
    return [1.0, found.rtt_s, found.skew_s, *ways[0], *ways[1]]
