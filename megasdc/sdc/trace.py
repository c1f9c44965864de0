"""Traces: one exact checksum for every observed result of a rank, in execution order.

No torch, so that traces can be read without it; ``megasdc.sdc.tracer`` records them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from megasdc.common.addresses import Address


@dataclass
class Trace:
    """Addresses and unsigned 64-bit checksums of results, in the order in which one rank computed them."""

    addresses: list[Address] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.addresses)

    def extend(self, other: Trace) -> None:
        """Append a later trace of the same rank."""
        self.addresses += other.addresses
        self.checksums += other.checksums


def trace_digest(trace: Trace) -> int:
    """One number for a trace, which changes with any address (except its step) or checksum."""
    state = xxhash.xxh3_64()
    for address, value in zip(trace.addresses, trace.checksums, strict=True):
        state.update(f"{address.micro_batch} {address.phase} {address.fqn} {address.slot} {value:x}\n".encode())
    return state.intdigest()
