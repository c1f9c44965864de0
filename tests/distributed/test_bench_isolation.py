"""A sample of `python -m tools.bench isolation`: faults that go on, and the bits of runs without the wrong replicas."""

from __future__ import annotations

import json

import pytest

from megasdc.common.errors import ConfigError
from tools.bench.isolation.campaign import bench_isolation
from tools.bench.isolation.options import IsolationOptions

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.mark.full
def test_a_sample() -> None:
    """Each wrong replica is left out, a clean run leaves nobody out, all ends are right; the counts add up."""
    result = bench_isolation(IsolationOptions(drills=3, kinds="clean,compute,weights", layouts="1x1x3"))
    assert [one.problems for one in result.drills] == [(), (), ()] and result.passed
    assert [len(one.isolated) for one in result.drills] == [0, 1, 1]
    found = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert len(found["lost_steps"]) == len(found["seconds"]) == 2 and all(one > 0 for one in found["seconds"])


def test_what_cannot_be_drawn_is_said() -> None:
    """Too few replicas, for one that is left out and for two."""
    with pytest.raises(ConfigError) as caught:
        IsolationOptions(drills=1, kinds="again", layouts="1x1x2")
    assert [one.partition(":")[0] for one in caught.value.problems] == ["--layouts", "--kinds"]
