"""Record, for the front, that a host's part of a launch has failed.

Over SSH the shell of every host runs this when its ``megasdc.ops.launch.node`` has ended with a code other than 0: also
if it was killed with SIGKILL, or one of its ranks was before it could write its own record. Called as
``python -m megasdc.ops.launch.host_failed FOLDER CODE``, with the launch's folder of records in base64; exits with
CODE.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from pathlib import Path

from megasdc.ops.launch.records import write_host_failed

FOLDER_VARIABLE = "MEGASDC_RECORDS"
"""Set by the front for the runner: the launch's folder of records."""


def words(folder: str) -> list[str]:
    """Arguments of Python in a POSIX shell, after ``||``."""
    return ["-m", "megasdc.ops.launch.host_failed", base64.urlsafe_b64encode(folder.encode()).decode(), "$?"]


def main(argv: Sequence[str]) -> int:
    """Write the record; return the exit code of this host's launcher."""
    folder, code = argv
    write_host_failed(Path(base64.urlsafe_b64decode(folder).decode()), int(code))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
