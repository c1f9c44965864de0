"""How often does a rank compute the golden workload?"""

from __future__ import annotations

import time

from megasdc.ops.golden.rank import _goes_on


def test_there_is_a_first_repeat_whatever_the_time() -> None:
    """Given repeats are as many; where time decides, the first is computed though start-up has used it up."""
    assert [_goes_on(repeat, 0.0, {"minutes": None, "repeats": 2}) for repeat in range(3)] == [True, True, False]
    assert _goes_on(0, time.monotonic() - 3600, {"minutes": 0.001, "repeats": 2})
