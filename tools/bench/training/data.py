"""Speed of preparing data, ``python -m tools.bench data``: against Megatron's own way, on the same text.

Both sides read one JSONL file of the standard library's text with the same number of processes and the same tokenizer,
which is given, and must write the same bytes. `tools.bench.training.data_side` has each side.
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megasdc
from megasdc.common.errors import MegasdcError
from megasdc.config.data import SourceSection
from megasdc.data.sources import iterate_documents, sample_documents
from megasdc.data.tokenizer import SENTENCEPIECE_FILE, train_sentencepiece
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Comparison, ComparisonResult, Report
from tools.bench.statistics import Cost, cost_of, median_walls, ratios, run_pairs
from tools.bench.training.options import DataBenchOptions

KINDS = ("sentencepiece", "huggingface")
BAR = 1.0
"""Largest median of our time over Megatron's."""
TRAIN_CHARACTERS = 1_000_000
"""Text that the tokenizers are trained on, before anything is measured."""
TIMEOUT_S = 3600.0
_PACKAGES = ("sentencepiece", "tokenizers", "datasets")


@dataclass(frozen=True)
class DataComparison(Comparison):
    """Our preparation against Megatron's with one kind of tokenizer.

    ``characters_per_s`` is the median over blocks, ours and Megatron's, all processes together; ``num_tokens`` counts
    end-of-document tokens too.
    """

    tokenizer: str
    characters_per_s: tuple[float, float]
    num_tokens: int


@dataclass(frozen=True)
class DataBenchResult(ComparisonResult):
    """Comparisons of preparations, and the numbers of documents and characters of the text."""

    comparisons: list[DataComparison]
    num_documents: int
    num_characters: int

    def report(self) -> Report:
        """Ratios, rates and whether bytes are equal, by kind of tokenizer."""
        options = self.options
        yield (
            f"{self.num_documents:,} documents, {self.num_characters:,} characters of the standard library as JSONL; "
            f"{options.workers} worker process(es); vocabulary {options.vocab}"
        )
        for comparison in self.comparisons:
            yield comparison.ratio_table(
                f"megasdc prepare-data against Megatron's preprocess_data, {comparison.tokenizer}"
            )
            ours, theirs = (rate / 1e6 for rate in comparison.characters_per_s)
            yield f"million characters/s {ours:.2f} : {theirs:.2f} (medians); {comparison.num_tokens:,} tokens"
            equal = "equal" if comparison.difference is None else f"FAIL, {comparison.difference} differs"
            yield f"bytes of .bin and .idx: {equal}"


def bench_data(
    options: DataBenchOptions,
    kinds: tuple[str, ...] = KINDS,
    on_progress: Progress = ignore_progress,
) -> DataBenchResult:
    """Measure on this machine, with kinds of tokenizers ``sentencepiece`` and ``huggingface``.

    Raises:
        MegasdcError: a side failed; the message ends with its output.
    """
    machine = describe_machine()
    machine["versions"] |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    with scratch_folder() as folder:
        on_progress("text and tokenizers", 0, 1)
        texts = _write_text(folder / "text.jsonl", options.characters)
        num_characters = sum(map(len, texts))
        sample, _ = sample_documents(texts, TRAIN_CHARACTERS)
        trainers = {"sentencepiece": _train_sentencepiece, "huggingface": _train_huggingface}
        for kind in kinds:
            trainers[kind](sample, folder / kind, options.vocab)
        on_progress("text and tokenizers", 1, 1)
        found = [_compare(options, kind, num_characters, folder, on_progress) for kind in kinds]
    return DataBenchResult(machine, options, found, len(texts), num_characters)


def _compare(
    options: DataBenchOptions, kind: str, num_characters: int, folder: Path, on_progress: Progress
) -> DataComparison:
    """Run both sides in turn, each time in a new process and into a new folder, and compare their files."""
    differences: list[str] = []
    outs = {side: folder / f"out_{side}" for side in ("ours", "megatron")}

    def block(side: str) -> Callable[[], Cost]:
        def run() -> Cost:
            shutil.rmtree(outs[side], ignore_errors=True)
            request = {
                "text": str(folder / "text.jsonl"),
                "out": str(outs[side]),
                "kind": kind,
                "tokenizer": str(folder / kind),
                "workers": options.workers,
            }
            return run_side(side, request)

        return run

    def after_pair() -> None:
        differences.extend(
            name
            for name in ("train.bin", "train.idx")
            if not filecmp.cmp(outs["ours"] / name, outs["megatron"] / name, shallow=False)
        )

    costs = run_pairs(kind, (block("ours"), block("megatron")), options.blocks, cost_of, on_progress, after_pair)
    manifest = json.loads((outs["ours"] / "manifest.json").read_text(encoding="utf-8"))
    walls = median_walls(costs)
    return DataComparison(
        tokenizer=kind,
        bar=BAR,
        ratios=ratios(costs),
        characters_per_s=(num_characters / walls[0], num_characters / walls[1]),
        num_tokens=manifest["splits"]["train"]["num_tokens"],
        difference=differences[0] if differences else None,
        costs=costs,
    )


def run_side(side: str, request: dict[str, Any]) -> Cost:
    """Run ``ours`` or ``megatron`` in a process of its own; its cost is after imports, all its processes together.

    The request is that of `tools.bench.training.data_side.run_megatron`. MegasdcError if it failed.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore")
    package = str(Path(megasdc.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.training.data_side", side, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise MegasdcError(f"the {side} side of the benchmark ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _write_text(path: Path, num_characters: int) -> list[str]:
    """Write documents of the standard library as JSONL until there are enough; returns them."""
    texts, held = [], 0
    with open(path, "w", encoding="utf-8") as file:
        for text in iterate_documents(SourceSection.model_validate({})):
            file.write(json.dumps({"text": text}) + "\n")
            texts.append(text)
            held += len(text)
            if held >= num_characters:
                break
    return texts


def _train_sentencepiece(texts: list[str], folder: Path, vocab_size: int) -> None:
    train_sentencepiece(texts, folder / SENTENCEPIECE_FILE, vocab_size)


def _train_huggingface(texts: list[str], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE as GPT-2's and write it as `transformers` does."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>")
    fast.save_pretrained(str(folder))
