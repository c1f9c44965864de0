"""Sections of the data: sources, tokenizer, and how tokens become samples; and their checks."""

from __future__ import annotations

import math
import os.path
import shlex
from collections.abc import Iterable, Iterator
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
    Problem,
    Section,
    section,
    setting,
)

SampleRange = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
"""First and end position of a range of samples, [first, end)."""


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
    """Folders of the tokens, and their division into samples."""

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
        """Command line that prepares these data; parts of a blend have configurations of their own, none is named."""
        words = ["megasdc", "prepare-data"]
        if not self.blend:
            words += ["--config", str(config)]
            for override in overrides:
                words += ["--set", override] if override.startswith("megasdc.data.") else []
        return shlex.join(words)


_PATHS = {
    "files": "a file, folder or glob",
    "hub": "the name of a hub dataset",
    "megatron": "the prefix of a .bin and .idx, one of them, or a folder of them",
}
"""Meaning of `path` for each kind of source that needs one."""


def data_problems(data: DataSection) -> Iterator[Problem]:
    """Yield every contradiction between the section's fields."""
    yield from _own_problems(data)
    yield from _blend_problems(data)


def _own_problems(data: DataSection) -> Iterator[Problem]:
    if not data.path.strip():
        yield Problem(("megasdc.data.path",), 'got ""; needed: the folder of prepared data.')
    if data.split[0] == 0:
        yield Problem(("megasdc.data.split",), f"got {data.split}; the share of training must be above 0.")
    ends = [0, *(end for _, end in data.skip)]
    if any(not before <= first < end for before, (first, end) in zip(ends, data.skip, strict=False)):
        needed = "ranges [first, end) that hold a sample each, do not overlap, and ascend"
        yield Problem(("megasdc.data.skip",), f"got {data.skip}; needed: {needed}.")
    for index, source in enumerate(data.sources):
        path = f"megasdc.data.sources.{index}"
        if source.kind == "stdlib" and source.path is not None:
            yield Problem((f"{path}.path",), 'kind "stdlib" takes no path; set kind "files", "hub" or "megatron".')
        if source.kind != "stdlib" and not source.path:
            yield Problem((f"{path}.path",), f'missing; kind "{source.kind}" needs {_PATHS[source.kind]}.')
        if source.pattern is not None and source.kind != "stdlib":
            yield Problem((f"{path}.pattern",), f'is for kind "stdlib", not "{source.kind}".')
        elif source.pattern is not None and not _inside(source.pattern):
            yield Problem(
                (f"{path}.pattern",),
                f'got "{source.pattern}"; needed: a glob of files inside the library, such as "*.py", where ".." is '
                'not used and "**" stands for whole folders.',
            )
        for name in ("name", "streaming"):
            if source.kind != "hub" and getattr(source, name):
                yield Problem((f"{path}.{name}",), f'is for kind "hub", not "{source.kind}".')
    yield from _id_problems(data)
    if data.tokenizer.kind == "huggingface" and not data.tokenizer.path:
        path = "megasdc.data.tokenizer.path"
        yield Problem((path,), 'missing; kind "huggingface" needs a folder or the name of a hub tokenizer.')


def _id_problems(data: DataSection) -> Iterator[Problem]:
    """Settings of text, and a tokenizer that is not given, where sources hold token ids."""
    of_ids = [index for index, source in enumerate(data.sources) if source.kind == "megatron"]
    for index in of_ids:
        source = data.sources[index]
        for name in ("split", "revision", "text_field", "text_unit"):
            if (value := getattr(source, name)) != type(source).model_fields[name].default:
                path = f"megasdc.data.sources.{index}.{name}"
                yield Problem((path,), f'got "{value}"; kind "megatron" has token ids, no text: leave it out.')
    if of_ids and data.tokenizer.path is None and data.tokenizer.kind == "sentencepiece":
        needed = f'the tokenizer that made the ids of megasdc.data.sources.{of_ids[0]}, of kind "megatron"'
        yield Problem(("megasdc.data.tokenizer.path",), f"missing; needed: {needed}.")
    if len(of_ids) == len(data.sources):
        for name, value in (
            ("max_unreadable", data.max_unreadable),
            ("tokenizer.accept_unknown", data.tokenizer.accept_unknown),
        ):
            if value:
                why = 'has no effect: it is about text, and all sources are of kind "megatron"; leave it out.'
                yield Problem((f"megasdc.data.{name}",), why)


def _inside(pattern: str) -> bool:
    """Whether a glob can match only below the folder in which it is used."""
    parts = pattern.split("/")
    odd = any(part == ".." or ("**" in part and part != "**") for part in parts)
    return bool(pattern.strip()) and not os.path.isabs(pattern) and not odd


def _blend_problems(data: DataSection) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, part in enumerate(data.blend):
        path = f"megasdc.data.blend.{index}.path"
        if not part.path.strip():
            yield Problem((path,), 'got ""; needed: a folder of prepared data.')
            continue
        before = first.setdefault(os.path.normpath(part.path), index)
        if before != index:
            yield Problem(
                (path, f"megasdc.data.blend.{before}.path"),
                f'got "{part.path}", which megasdc.data.blend.{before}.path names already; give each folder once, '
                "with the sum of the weights.",
            )
    if data.blend and data.path.strip() and os.path.normpath(data.path) not in first:
        yield Problem(
            ("megasdc.data.path", "megasdc.data.blend"),
            f'got "{data.path}", which is not in megasdc.data.blend '
            f"({', '.join(part.path for part in data.blend)}); name one of its folders or add it to the blend.",
        )
    if not math.isfinite(sum(part.weight for part in data.blend)):
        yield Problem(("megasdc.data.blend",), "the sum of the weights is infinite; scale them.")
