"""Which documents is a sample made of, and where do they come from?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megasdc.data.dataset import build_datasets
from megasdc.data.manifest import DataManifest
from megasdc.data.merge import DocumentOrigins
from megasdc.data.prepare import prepare
from megasdc.data.tokenizer import load_tokenizer


def test_parts_of_documents_put_together_are_the_sample(tmp_path, prepared):
    """The parts of every sample of two epochs, read from Megatron's file, are its tokens and its last label."""
    train, _ = build_datasets(prepared, 640, 10**6, 0, tmp_path)
    data = IndexedDataset(str(Path(prepared.path) / "train"))
    several = 0
    for position in range(2 * train.samples_per_epoch):
        parts = train.documents(position)
        several += len(parts) > 1
        read = [data.get(part.document, part.first_token, part.num_tokens) for part in parts]
        tokens, labels, _ = train[position]
        assert np.concatenate(read).tolist() == torch.cat([tokens, labels[-1:]]).tolist()
    assert several > 3, "some samples hold more than one document"


def test_documents_are_traced_to_their_source(tmp_path, prepared, corpus, section_for):
    """Each document of each split is the text of the file that its source has at that place."""
    files = sorted(corpus.glob("*.txt"))[:12]
    sources = []
    for name, chosen in (("one", files[:5]), ("two", files[5:])):
        (tmp_path / name).mkdir()
        for file in chosen:
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        sources.append({"kind": "files", "path": str(tmp_path / name)})
    tokenizer = {"path": str(Path(prepared.path) / "tokenizer")}
    section = section_for(tmp_path / "data", corpus, sources=sources, split=[6, 3, 3], tokenizer=tokenizer)
    manifest = prepare(section, progress=False)
    tokens = load_tokenizer("sentencepiece", tmp_path / "data" / "tokenizer")
    traced = set()
    for split in manifest.splits:
        data, origins = (
            IndexedDataset(str(tmp_path / "data" / split)),
            DocumentOrigins(DataManifest.load(section.path), split),
        )
        for document in range(len(data)):
            source, number = origins.of(document)
            folder = tmp_path / ("one" if "one" in source else "two")
            file = sorted(folder.glob("*.txt"))[number]
            text = file.read_bytes().decode().replace("\r\n", "\n")
            assert tokens.decode(data[document].tolist()) == text
            traced.add(file.name)
    assert traced == {file.name for file in files}
