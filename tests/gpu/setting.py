"""What the parts train: made-up tokens with structure that can be learned, small models, complete configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.trainings.styles import LLAMA

VOCAB = 500
LAST_ID = VOCAB - 1
DOCUMENT_TOKENS = 1500

SIZES: dict[str, dict[str, int]] = {
    "cuda": {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "max_positions": 256},
    "cpu": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 32},
}


def write_data(folder: Path) -> Path:
    """Prepared data without a text, a tokenizer or the libraries that make them: `megasdc.train` sees no difference."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megasdc.data.manifest import (
        BLOCK_BYTES,
        FORMAT_VERSION,
        TOKENIZER_FOLDER,
        DataManifest,
        SplitRecord,
        TokenizerRecord,
        digest_settings,
        record_files,
        write_checksums,
    )

    (folder / TOKENIZER_FOLDER).mkdir(parents=True)
    (folder / TOKENIZER_FOLDER / "made_up.json").write_text(json.dumps({"vocab_size": VOCAB}), encoding="utf-8")
    draws, splits = np.random.default_rng(5), {}
    for name, documents in (("train", 64), ("valid", 8)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for _ in range(documents):
            start, stride = draws.integers(LAST_ID), draws.integers(1, 4)
            tokens = (start + stride * np.arange(DOCUMENT_TOKENS)) % LAST_ID
            builder.add_document(np.append(tokens, LAST_ID).astype(np.uint16), [DOCUMENT_TOKENS + 1])
        builder.finalize(str(folder / f"{name}.idx"))
        write_checksums(folder / f"{name}.bin")
        total = documents * (DOCUMENT_TOKENS + 1)
        splits[name] = SplitRecord(num_documents=documents, num_tokens=total, num_bytes=total)
    settings = {"made_up": True}
    DataManifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        settings_digest=digest_settings(settings),
        sources=[],
        tokenizer=TokenizerRecord(kind="made up", vocab_size=VOCAB, end_of_document=LAST_ID, checksum="0"),
        splits=splits,
        dtype="uint16",
        unigram_entropy_nats=0.0,
        versions={},
        files=record_files(folder),
        block_bytes=BLOCK_BYTES,
    ).save(folder)
    return folder


def write_config(folder: Path, name: str, data: Path, device: str, **changes: Any) -> Path:
    """A configuration of six steps of eight samples; ``changes`` are dotted paths with ``__`` for the dots.

    ``ds__`` begins a path of DeepSpeed's part. Ranks may share a device.
    """
    sizes = SIZES[device]
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "megasdc": {
            "model": {**sizes, **LLAMA},
            "data": {"path": str(data), "sequence_length": sizes["max_positions"]},
            "parallel": {"timeout_s": 60.0, "share_devices": True},
            "protect": "off",
            "training": {"steps": 6},
            "checkpoint": {"interval": 0},
            "logging": {"run_dir": str(folder / name), "interval": 1},
        },
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = config if parents[:1] == ["ds"] else config["megasdc"]
        for parent in parents[1:] if place is config else parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def precision(kind: str) -> dict[str, Any]:
    """What makes a run train in a type."""
    if kind == "fp32":
        return {}
    return {"ds__bf16__enabled": True} if kind == "bf16" else {"ds__fp16__enabled": True, "ds__fp16__loss_scale": 0}


def metrics(run_dir: Path, name: str = "train/loss") -> list[float]:
    """One metric of every step."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [row[name] for row in rows if name in row]
