"""A run keeps its id over restarts, and its starts are counted."""

import pytest

from megasdc.common.errors import StorageError
from megasdc.common.origin import RunIdentity, count_start, read_identity


def test_the_id_stays_and_starts_are_counted(tmp_path):
    """The first start gives the id, later ones count; another folder has another id."""
    assert read_identity(tmp_path) is None
    first = count_start(tmp_path)
    assert first.attempt == 1 and count_start(tmp_path) == RunIdentity(first.run, 2)
    assert read_identity(tmp_path) == RunIdentity(first.run, 2)
    (tmp_path / "other").mkdir()
    assert count_start(tmp_path / "other").run != first.run


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", '{"format": "other", "run": "a", "attempt": 1}', "\udcff"),
        pytest.param("[" * 99_999, id="deep"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, content):
    """Nothing is guessed, and the file stays as it is."""
    path = tmp_path / "run.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(StorageError, match=r"run\.json cannot be used: .*; delete it"):
        count_start(tmp_path)
    assert path.read_text(errors="surrogateescape") == content
