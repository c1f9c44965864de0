"""A small real corpus, and the same corpus prepared once."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megasdc.config.data import DataSection
from megasdc.data.prepare import prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with a space in its name, of 40 text files: the standard library's own modules, 0.8 MB."""
    folder = tmp_path_factory.mktemp("a corpus")
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    modules = [path for path in modules if path.stat().st_size > 1000][:40]
    for path in modules:
        (folder / f"{path.stem}.txt").write_bytes(path.read_bytes())
    return folder


def section_for(path, corpus, **changes):
    """Settings that prepare the corpus with 600 pieces."""
    content = {
        "path": str(path),
        "sequence_length": 64,
        "split": [8, 1, 1],
        "sources": [{"kind": "files", "path": str(corpus)}],
        "tokenizer": {"vocab_size": 600, "train_characters": 200_000},
    }
    return DataSection.model_validate({**content, **changes})


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, corpus):
    """The section of a prepared folder; tests must not change the folder."""
    section = section_for(tmp_path_factory.mktemp("out") / "data set", corpus)
    prepare(section, workers=1, progress=False)
    return section


def to_version_1(folder):
    """Make prepared data what the version before would have written: no checksums of blocks, none of the manifest."""
    path = Path(folder) / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"], content["block_bytes"]
    content["format_version"] = 1
    for source in content["sources"]:
        del source["skipped_at"]
    for file in Path(folder).glob("*.checksums"):
        del content["files"][file.name]
        file.unlink()
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@pytest.fixture(name="to_version_1", scope="session")
def to_version_1_fixture():
    return to_version_1


@pytest.fixture(name="section_for", scope="session")
def section_for_fixture():
    return section_for


@pytest.fixture(scope="session")
def huggingface_folder(tmp_path_factory, corpus):
    """A byte-level BPE tokenizer as GPT-2's, trained here."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        [path.read_text() for path in sorted(corpus.glob("*.txt"))[:5]],
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder = tmp_path_factory.mktemp("hf")
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
