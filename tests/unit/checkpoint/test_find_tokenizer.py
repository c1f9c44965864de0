"""Which tokenizer fits a checkpoint?"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.common.errors import DataError
from megasdc.data.tokenizer import checksum_tokenizer, train_sentencepiece
from megasdc.interchange.export_hf import find_tokenizer


def test_a_tokenizer_may_have_as_many_entries_as_the_model(tmp_path: Path) -> None:
    """Not one more: its last ids would have no embedding."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    file = folder / "tokenizer.model"
    train_sentencepiece([Path(argparse.__file__).read_text(encoding="utf-8")], file, 400)
    known = {"path": tmp_path, "config": {"megasdc": {"data": {"path": str(tmp_path)}}}}
    for entries in (400, 512):
        weights: Any = SimpleNamespace(
            **known, vocab_size=entries, tokenizer_checksum=checksum_tokenizer("sentencepiece", file)
        )
        assert find_tokenizer(weights).vocab_size == 400
    weights.vocab_size = 399
    with pytest.raises(DataError, match=r"has 400 entries, the model of .* only 399"):
        find_tokenizer(weights)
