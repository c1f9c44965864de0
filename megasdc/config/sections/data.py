"""Sections of the data: sources, tokenizer, and how tokens become samples."""

from __future__ import annotations

from typing import Literal

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
)


class SourceSection(Section):
    """One source of text for `prepare-data`."""

    at_resume = "-"

    kind: Literal["stdlib", "files", "hub"] = Field(
        "stdlib",
        description="stdlib: text of the running Python's standard library; files: local files or folders; "
        "hub: a dataset by its Hugging Face name.",
    )
    path: str | None = Field(
        None,
        description="files: a file, a folder or a glob of .txt, .jsonl, .parquet (.gz and .zst too); hub: its name.",
    )
    name: str | None = Field(None, description="hub: configuration name, such as `en` of allenai/c4.")
    split: str = Field("train", description="hub: which split to read.")
    revision: str | None = Field(None, description="hub: commit, tag or branch to read; null: the newest.")
    text_field: str = Field("text", description="Column or JSON key that holds the text.")
    text_unit: Literal["file", "paragraph", "line"] = Field(
        "file", description="files: what one document of a .txt file is; paragraphs are divided by empty lines."
    )
    streaming: bool = Field(False, description="hub: read without downloading the whole dataset first.")
    max_documents: PositiveInt | None = Field(None, description="Stop after so many documents; null: all.")
    pattern: str | None = Field(
        None,
        description="stdlib: only files that match this glob below the library's folder, such as `json/*.py` or "
        "`*/**/*.py` (`**`: any number of folders); null: all.",
    )


class TokenizerSection(Section):
    """The tokenizer that `prepare-data` trains or loads."""

    at_resume = "-"

    kind: Literal["sentencepiece", "huggingface"] = Field("sentencepiece", description="Tokenizer library.")
    path: str | None = Field(
        None,
        description="sentencepiece: a .model file, null: train one on the sources; huggingface: a folder or hub name.",
    )
    vocab_size: PositiveInt = Field(8192, description="Pieces of a SentencePiece model trained here.")
    model_type: Literal["bpe", "unigram"] = Field("bpe", description="Algorithm of a SentencePiece model trained here.")
    train_characters: PositiveInt = Field(
        20_000_000, description="Characters of text, evenly sampled, that a SentencePiece model is trained on."
    )


class BlendSection(Section):
    """One folder of prepared data in a blend."""

    at_resume = "universal"

    path: str = Field(..., description="Folder of prepared data.", json_schema_extra=APPLIED)
    weight: PositiveFloat = Field(..., description="Its share of the samples, relative to the other weights.")


class DataSection(Section):
    """Where the tokens are and how they are cut into samples."""

    path: str = Field(
        ..., description="Folder of prepared data (the output of `megasdc prepare-data`).", json_schema_extra=APPLIED
    )
    blend: list[BlendSection] = Field(
        default_factory=list,
        description="Folders to draw samples from, each with its weight; `path` must be one of them, and all must have "
        "been prepared with one tokenizer. Empty: `path` alone.",
        json_schema_extra=UNIVERSAL,
    )
    sequence_length: PositiveInt = Field(512, description="Tokens s of one sample.", json_schema_extra=UNIVERSAL)
    split: list[NonNegativeInt] = Field(
        [98, 1, 1],
        min_length=3,
        max_length=3,
        description="Shares of the documents for train, validation and test; fixed when the data are prepared.",
        json_schema_extra=FLAG,
    )
    seed: NonNegativeInt = Field(
        1234, description="Seed of the order of documents and samples.", json_schema_extra=UNIVERSAL
    )
    mask_end_of_document: bool = Field(
        False,
        description="Exclude the loss at end-of-document tokens from every sum and average.",
        json_schema_extra=FLAG,
    )
    sources: list[SourceSection] = Field(
        default_factory=lambda: [SourceSection.model_validate({})],
        min_length=1,
        description="What `prepare-data` reads, in this order.",
        json_schema_extra=NO_MATTER,
    )
    tokenizer: TokenizerSection = section(TokenizerSection, description="What `prepare-data` tokenizes with.")

    @property
    def folders(self) -> list[str]:
        """All folders of the samples, in the order of the blend."""
        return [part.path for part in self.blend] or [self.path]
