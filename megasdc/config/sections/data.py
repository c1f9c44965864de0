"""Sections of the data: sources, tokenizer, and how tokens become samples."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megasdc.config.fields import (
    APPLIED,
    FLAG,
    NO_MATTER,
    UNIVERSAL,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    section,
    setting,
)

SampleRange = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
"""[first, end)."""


class SourceSection(Section):
    """One source of text, or of token ids, for `prepare-data`."""

    at_resume = "-"

    kind: Literal["stdlib", "files", "hub", "megatron"] = setting(
        "stdlib",
        "stdlib: text of the running Python's standard library; files: local files or folders; hub: a dataset by its "
        "Hugging Face name; megatron: token ids of `tokenizer.path` in Megatron's or NeMo's .bin and .idx, copied.",
    )
    path: str | None = setting(
        None,
        "files: a file, a folder or a glob of .txt, .jsonl (.ndjson, and .json that holds JSON lines), .parquet "
        "(.gz and .zst too); hub: its name; megatron: the prefix of a .bin and .idx, one of them, or a folder.",
    )
    name: str | None = setting(None, "hub: configuration name, such as `en` of allenai/c4.")
    split: str = setting("train", "hub: which split to read.")
    revision: str | None = setting(None, "hub: commit, tag or branch to read; null: the newest.")
    text_field: str = setting("text", "Column or JSON key that holds the text.")
    text_unit: Literal["file", "paragraph", "line"] = setting(
        "file", "files: what one document of a .txt file is; paragraphs are divided by blank lines (spaces, tabs)."
    )
    streaming: bool = setting(False, "hub: read without downloading the whole dataset first.")
    max_documents: PositiveInt | None = setting(None, "Stop after so many documents; null: all.")
    pattern: str | None = setting(
        None,
        "stdlib: only files that match this glob below the library's folder, such as `json/*.py` or `*/**/*.py` "
        "(`**`: any number of folders); null: all.",
    )


class TokenizerSection(Section):
    """The tokenizer that `prepare-data` trains or loads."""

    at_resume = "-"

    kind: Literal["sentencepiece", "huggingface"] = setting("sentencepiece", "Tokenizer library.")
    path: str | None = setting(
        None, "sentencepiece: a .model file, null: train one on the sources; huggingface: a folder or hub name."
    )
    vocab_size: PositiveInt = setting(8192, "Pieces of a SentencePiece model trained here.")
    model_type: Literal["bpe", "unigram"] = setting("bpe", "Algorithm of a SentencePiece model trained here.")
    train_characters: PositiveInt = setting(
        20_000_000, "Characters of text, evenly sampled, that a SentencePiece model is trained on."
    )
    accept_unknown: bool = setting(
        False,
        "Accept a tokenizer that knows less than half of the characters of a sample of the sources; false: it is an "
        "error.",
    )

    def of_tokens(self) -> dict[str, Any]:
        """The settings that tokens depend on, as JSON-compatible values."""
        return self.model_dump(mode="json", exclude={"accept_unknown"})


class BlendSection(Section):
    """One folder of prepared data in a blend."""

    at_resume = "universal"

    path: str = setting(..., "Folder of prepared data.", APPLIED)
    weight: PositiveFloat = setting(..., "Its share of the samples, relative to the other weights.")


class DataSection(Section):
    """Where the tokens are and how they are cut into samples."""

    path: str = setting(..., "Folder of prepared data (the output of `megasdc prepare-data`).", APPLIED)
    blend: list[BlendSection] = Field(
        default_factory=list,
        description="Folders to draw samples from, each with its weight; `path` must be one of them, and all must have "
        "been prepared with one tokenizer. Empty: `path` alone.",
        json_schema_extra=UNIVERSAL,
    )
    sequence_length: PositiveInt = setting(512, "Tokens s of one sample.", UNIVERSAL)
    split: list[NonNegativeInt] = setting(
        [98, 1, 1],
        "Shares of the documents for train, validation and test; fixed when the data are prepared.",
        FLAG,
        min_length=3,
        max_length=3,
    )
    seed: NonNegativeInt = setting(1234, "Seed of the order of documents and samples.", UNIVERSAL)
    skip: list[SampleRange] = setting(
        [],
        "Samples that are never trained on, as ranges [first, end) of positions in the training stream, ascending; "
        "the metric `data/stream_end` tells how far a step has come. A range that a checkpoint is past cannot be "
        "changed when the run resumes from it.",
        APPLIED,
    )
    mask_end_of_document: bool = setting(
        False, "Exclude the loss at end-of-document tokens from every sum and average.", FLAG
    )
    bos: Literal[True] | None = setting(
        None,
        "Put a beginning-of-sequence token before every document when the data are prepared: true: the tokenizer's own "
        "(Llama's `<s>`); null: none. It must be that of the prepared data.",
        UNIVERSAL,
    )
    sources: list[SourceSection] = Field(
        default_factory=lambda: [SourceSection.model_validate({})],
        min_length=1,
        description="What `prepare-data` reads, in this order.",
        json_schema_extra=NO_MATTER,
    )
    max_unreadable: NonNegativeInt = setting(
        0,
        "How many documents, lines or files of all sources `prepare-data` may skip because they cannot be read: not "
        "UTF-8, no JSON, cut off, no text in the column. They are counted and listed; one more is an error. 0: the "
        "first is an error.",
        NO_MATTER,
    )
    tokenizer: TokenizerSection = section(TokenizerSection, description="What `prepare-data` tokenizes with.")

    @property
    def folders(self) -> list[str]:
        """All folders of the samples, in the order of the blend."""
        return [part.path for part in self.blend] or [self.path]

    def prepare_command(self, config: Path, overrides: Iterable[str]) -> str:
        """The command line that makes these data; parts of a blend are made from files of their own, none is named."""
        words = ["megasdc", "prepare-data"]
        if not self.blend:
            words += ["--config", str(config)]
            for override in overrides:
                words += ["--set", override] if override.startswith("megasdc.data.") else []
        return shlex.join(words)
