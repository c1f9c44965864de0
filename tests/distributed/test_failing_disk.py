"""Does a run outlive a disk that fails while events and metrics are written, and lose none of them?"""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.events import read_events

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

HOOK = '''
import os
from pathlib import Path
from megasdc.optim.hooks import GradientHook

class Breaks(GradientHook):
    """Lets the next line of a file fail with EIO: its descriptor is then that of memory which there is not."""
    done = False

    def apply(self, part):
        if part.step != 3 or self.done:
            return
        self.done = True
        for name in os.listdir("/proc/self/fd"):
            path = Path(os.readlink(f"/proc/self/fd/{name}")) if os.path.exists(f"/proc/self/fd/{name}") else Path()
            if path.name in ("metrics.jsonl", "rank_00000.jsonl", "rank_00001.jsonl"):
                memory = os.open("/proc/self/mem", os.O_WRONLY)
                os.dup2(memory, int(name))
                os.close(memory)
                Path(f"{path}.broken").touch()
'''
SILENT = HOOK.replace("part.step != 3", "True")


def test_a_run_outlives_a_disk_that_fails_for_a_line(tmp_path: Path) -> None:
    """All ranks end with 0 and the bits of a run without; every line of events and metrics is there, in order."""
    data = prepare_text(tmp_path)
    for name, text in (("plain", SILENT), ("broken", HOOK)):
        hook = tmp_path / f"{name}.py"
        hook.write_text(text)
        config = write_config(
            *(tmp_path / f"{name}.json", data, tmp_path / name),
            optimizer_hooks=[{"hook": "file", "path": str(hook), "name": "Breaks"}],
        )
        assert train_run(config, 2) == [(0, None)] * 2
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    assert metrics_of(plain) == metrics_of(broken)
    (end,) = (plain / "checkpoints").glob("step_*")
    assert state_of(end) == state_of(broken / "checkpoints" / end.name)
    told = [
        sorted((one.rank, one.kind, one.name, one.step or 0) for one in read_events(folder) if one.kind != "start")
        for folder in (plain, broken)
    ]
    assert told[0] == told[1]
    broke = sorted(path.name for path in broken.rglob("*.broken"))
    assert broke == ["metrics.jsonl.broken", "rank_00000.jsonl.broken", "rank_00001.jsonl.broken"]
