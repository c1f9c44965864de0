"""Sinks have their folders before anything is built, or the run ends with the storage code."""

import pytest

from megasdc.common.errors import StorageError
from megasdc.train.build import prepare_sink_folders


@pytest.mark.parametrize("monitor", ["tensorboard", "csv_monitor"])
def test_a_monitors_folder_is_made_or_refused_by_its_field(tmp_path, monitor):
    """The folder of an enabled monitor is made; a file in the way or a name that is too long is told with the field."""
    prepare_sink_folders({monitor: {"enabled": True, "output_path": str(tmp_path / "a"), "job_name": "b"}})
    assert (tmp_path / "a" / "b").is_dir()
    prepare_sink_folders({monitor: {"enabled": True, "output_path": str(tmp_path), "job_name": "apart"}}, replica=1)
    assert (tmp_path / "apart" / "replica_1").is_dir(), "replicas of Local-SGD do not write into one"
    (tmp_path / "file").write_text("")
    for wrong in ({"output_path": str(tmp_path / "file")}, {"output_path": str(tmp_path), "job_name": "x" * 300}):
        with pytest.raises(StorageError, match=rf"{monitor}\.output_path: .* is not writable"):
            prepare_sink_folders({monitor: {"enabled": True, **wrong}})


def test_a_monitor_that_is_off_makes_nothing(tmp_path):
    """Without `enabled` no folder is made."""
    prepare_sink_folders({"csv_monitor": {"enabled": False, "output_path": str(tmp_path / "a")}, "tensorboard": {}})
    assert not list(tmp_path.iterdir())
