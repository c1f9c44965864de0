"""A golden file from anybody is read within its own size."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from megasdc.common.errors import TraceError
from megasdc.sdc.golden import read_members, read_sealed_header, write_sealed


def test_a_compressed_member_is_not_read(tmp_path: Path) -> None:
    """Neither the header nor a trace: a few megabytes would become gigabytes before their digest is known."""
    whole, packed = tmp_path / "whole.golden", tmp_path / "packed.golden"
    write_sealed(whole, {"format": "test", "algorithm": "sum"}, {"trace": bytes(1 << 20)})
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    header = {"sha256": {}}
    with pytest.raises(TraceError, match="is compressed"):
        read_sealed_header(packed, ("test",), "record it")
    with pytest.raises(TraceError, match="is compressed"):
        read_members(packed, header, ["trace"])
    with pytest.raises(TraceError, match="is not the trace"):
        read_members(whole, header, ["trace"])
