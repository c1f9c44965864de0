"""What did a rank compute? A trace: one exact checksum for every observed result, in the order of execution.

No torch, so that traces can be looked at without; ``megasdc.sdc.tracer`` records them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from megasdc.addresses import Address


@dataclass
class Trace:
    """Checksums in the order in which one rank computed them.

    Args:
        addresses: where each result belongs.
        checksums: the unsigned 64-bit checksum of each.
    """

    addresses: list[Address] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.addresses)

    def extend(self, other: Trace) -> None:
        """Append what came later."""
        self.addresses += other.addresses
        self.checksums += other.checksums


def digest(trace: Trace) -> int:
    """One number for a trace, addresses and checksums, that differs if any of them does."""
    state = xxhash.xxh3_64()
    for address, value in zip(trace.addresses, trace.checksums, strict=True):
        state.update(f"{address.micro_batch} {address.phase} {address.fqn} {address.slot} {value:x}\n".encode())
    return state.intdigest()
