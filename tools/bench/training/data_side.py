"""One timed run of a tokenization in a process of its own: ``python -m tools.bench.training.data_side SIDE REQUEST``.

``ours`` is `megasdc.data.prepare.prepare`, whole: reading, worker processes and their start, shards that survive a
kill, Megatron's files, checksums, frequencies and manifest, all on disk. ``megatron`` does what Megatron-LM's
``tools/preprocess_data.py`` does with ``--workers N --append-eod``: a forked `multiprocessing` pool whose workers load
the tokenizer and get the lines of a JSONL file in chunks of 32 through `imap`, and a parent that adds each document to
Megatron-core's `IndexedDatasetBuilder`. It writes nothing else and asks for nothing to be on disk. Its calls of the
tokenizer are the plainest there are; Megatron's own wrappers do more.

Imports are done before the clock starts; what worker processes import is counted, as they are started by the work.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK_LINES = 32
"""Lines that a worker of Megatron's gets at a time."""


class LineEncoder:
    """Encoder in a worker of Megatron's: one JSON line to the ids of its text and an end-of-document id.

    The tokenizer is ``sentencepiece`` or ``huggingface``, and ``path`` its folder.
    """

    encode_text: Callable[[str], list[int]]
    end_of_document: int

    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.path = path

    def load(self) -> int:
        """Load the tokenizer into this process; returns the size of its vocabulary."""
        if self.kind == "sentencepiece":
            import sentencepiece

            model = sentencepiece.SentencePieceProcessor(model_file=str(Path(self.path) / "tokenizer.model"))
            LineEncoder.encode_text = model.encode
            LineEncoder.end_of_document = model.eos_id()
            return model.get_piece_size()
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        tokenizer.model_max_length = int(1e30)
        LineEncoder.encode_text = lambda text: tokenizer(text).input_ids
        LineEncoder.end_of_document = tokenizer.eos_token_id
        return len(tokenizer)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        """Return the ids of a line's text, their number as the only sentence, and the characters of the line."""
        ids = LineEncoder.encode_text(json.loads(line)["text"])
        if ids:
            ids.append(LineEncoder.end_of_document)
        return ids, [len(ids)], len(line)


def run_megatron(request: dict[str, Any]) -> None:
    """Tokenize as ``tools/preprocess_data.py`` does.

    The request holds ``text`` (JSONL file), ``out`` (folder), ``kind`` and ``tokenizer`` (folder), ``workers``.

    Source: https://github.com/NVIDIA/Megatron-LM/blob/main/tools/preprocess_data.py
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    out = Path(request["out"])
    out.mkdir(parents=True)
    encoder = LineEncoder(request["kind"], request["tokenizer"])
    vocab_size = encoder.load()
    with open(request["text"], encoding="utf-8") as lines:
        pool = multiprocessing.get_context("fork").Pool(request["workers"], initializer=encoder.load)
        builder = IndexedDatasetBuilder(str(out / "train.bin"), dtype=DType.optimal_dtype(vocab_size))
        for ids, lengths, _ in pool.imap(encoder.encode, lines, CHUNK_LINES):
            builder.add_document(ids, lengths)
        builder.finalize(str(out / "train.idx"))
        pool.close()
        pool.join()


def run_ours(request: dict[str, Any]) -> None:
    """Tokenize as ``megasdc prepare-data`` does; the request is as in `run_megatron`."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    section = DataSection.model_validate(
        {
            "path": request["out"],
            "split": [1, 0, 0],
            "sources": [{"kind": "files", "path": request["text"]}],
            "tokenizer": {"kind": request["kind"], "path": request["tokenizer"]},
        }
    )
    prepare(section, workers=request["workers"], progress=False)


def main() -> None:
    """Run one side and print its cost as JSON."""
    side, request = sys.argv[1], json.loads(sys.argv[2])
    import datasets  # noqa: F401
    import megatron.core.datasets.indexed_dataset  # noqa: F401

    import megasdc.data.prepare  # noqa: F401

    if request["kind"] == "huggingface":
        import transformers  # noqa: F401
    else:
        import sentencepiece  # noqa: F401
    cpu, begin = _cpu_s(), time.perf_counter()
    (run_ours if side == "ours" else run_megatron)(request)
    wall = time.perf_counter() - begin
    print(json.dumps({"wall_s": wall, "cpu_s": _cpu_s() - cpu}))


def _cpu_s() -> float:
    """Processor time of this process and of all children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
