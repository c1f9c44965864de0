"""A launch that was frozen, or cut off, for so long that another one took its folder changes nothing there any more.

The lock of a run folder ends such a launch at its next step (``megasdc.train.build``). What a save does
outside of steps, and in the moment in which a host wakes up, is kept out here: the record in the folder must still name
this launch when a checkpoint gets its name, its marker, or the file ``latest``, and before old ones are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasdc.common.run_lock import read_holder


class FencedError(OSError):
    """Another launch has taken the folder."""


@dataclass(frozen=True)
class Fence:
    """The claim of a launch on a folder.

    Args:
        folder: that is locked, with the checkpoints in it.
        token: of the launch, in the record of its lock.
    """

    folder: Path
    token: str

    def check(self) -> None:
        """Let go on only the launch that holds the folder; a record that cannot be read stops nobody.

        Raises:
            FencedError: another one has taken it.
        """
        holder = read_holder(self.folder)
        if holder is not None and holder.token != self.token:
            raise FencedError(f"{self.folder} was taken by {holder} while this launch stood still; nothing is changed")
