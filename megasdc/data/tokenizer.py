"""Tokenizers, text to token ids and back: SentencePiece and Hugging Face behind one small interface.

Imports neither torch nor Megatron, so that worker processes start fast. Text is not normalised or stripped by this
module, and text that looks like a special token is never encoded as one.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megasdc.common.durable import parse_json, replacing
from megasdc.common.errors import DataError

SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
_FURTHER_FILES = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files of a Hugging Face tokenizer besides those whose name begins with ``tokenizer``."""
_ON_THE_HUB = ["*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "*.codes"]
"""Patterns of a tokenizer's files in a model's repository, and of the configuration that may tell its class."""
BACKEND_FILE = "backend.json"
END_OF_DOCUMENT_PIECE = "<eod>"
TRAIN_CHUNK_CHARACTERS = 4000
"""Maximum length of a training text of SentencePiece; at most 16000 bytes, below its limit of 16384."""
PROBES = (
    "def f(x):\n    return x  # two  spaces\n\n\n\tif x:\n\t\tpass\n",
    " leading, trailing and        many spaces   ",
    "\n\n \n  \n    \n\t\n \t \r\n",
    "caf\u00e9 na\u00efve \u4f60\u597d \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600\U0001f680",
    "\u2581 \u00a0 \ufeff \u200b",
    "<eod> <unk> <s> </s> <0x41> [CLS] <|endoftext|>",
    "0123456789 3.14159 1e-10 0xff a_b-c+d*e/f==g!=h<=i>=j",
    "",
    " ",
    "    " * 9 + "x" + " " * 17 + "the the  the   the    the",
    "\x00\x01\x7f",
)
"""Texts on which tokenizers tend to differ."""


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        kind: ``sentencepiece`` or ``huggingface``.
        vocab_size: number of ids, which are in [0, vocab_size).
        end_of_document: the id put after every document; never produced from text.
        checksum: XXH3-64 of the model files.
        unknown: the id of text that the tokenizer does not know; None: there is none.
        beginning_of_document: id of the tokenizer's beginning-of-sequence token; None: it has none.
    """

    unknown: int | None = None
    beginning_of_document: int | None = None
    kind: str
    vocab_size: int
    end_of_document: int
    checksum: str

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text, without an end-of-document id."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text as by `encode`, each as an array [ids] int32."""
        return [np.array(ids, dtype=np.int32) for ids in self.encode(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an end-of-document id gives no text."""

    def count_unknown(self, text: str) -> int:
        """Number of characters that become unknown ids; here the share of these ids."""
        ids = self.encode([text])[0]
        return round(len(text) * ids.count(-1 if self.unknown is None else self.unknown) / max(len(ids), 1))

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model files into a folder that `load_tokenizer` reads."""

    def worker_files(self, folder: Path, scratch: Path) -> tuple[str, Path]:
        """Kind and path with which `load_tokenizer` makes one in a worker process that encodes in the same way.

        ``folder``: where `save` wrote this tokenizer; ``scratch``: a writable folder.
        """
        return self.kind, folder


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, at the path of a model file, or of a folder that holds `tokenizer.model`.

    ``decode(encode(text)) == text`` holds for models trained here, except for U+2581, which SentencePiece uses for the
    space and decodes as one.

    Attributes:
        model_file: path of the model file, also if a folder was given.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path | str) -> None:
        import sentencepiece

        file = Path(path)
        self.model_file = file / SENTENCEPIECE_FILE if file.is_dir() else file
        self.checksum = checksum_tokenizer(self.kind, path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(self.model_file))
        except (OSError, RuntimeError) as error:
            raise DataError(f"file {self.model_file} is not a SentencePiece model: {error}") from error
        self.vocab_size = self._model.get_piece_size()
        self.unknown = self._model.unk_id()
        self.beginning_of_document = self._model.bos_id() if self._model.bos_id() >= 0 else None
        piece = self._model.piece_to_id(END_OF_DOCUMENT_PIECE)
        known = self._model.id_to_piece(piece) == END_OF_DOCUMENT_PIECE
        self.end_of_document = piece if known else self._model.eos_id()
        if self.end_of_document < 0:
            raise DataError(
                f"tokenizer {self.model_file} has neither {END_OF_DOCUMENT_PIECE} nor an end-of-sentence piece"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text."""
        return self._model.encode(list(texts), num_threads=1)

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text; without lists of Python integers if SentencePiece supports it."""
        if not hasattr(self._model, "encode_as_numpy"):  # older versions of SentencePiece
            return super().encode_arrays(texts)
        return self._model.encode_as_numpy(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._model.decode([int(token) for token in ids])

    def count_unknown(self, text: str) -> int:
        """Number of characters that become unknown ids, of which one stands for several characters."""
        pieces = zip(self._model.encode(text), self._model.encode(text, out_type=str), strict=True)
        return sum(len(piece) for token, piece in pieces if token == self.unknown)

    def save(self, folder: Path) -> None:
        """Copy the model file."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.model_file, folder / SENTENCEPIECE_FILE)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of `transformers`, from a folder, or by a name on the hub."""

    kind = "huggingface"

    def __init__(self, path: Path | str) -> None:
        import transformers

        try:
            self._folder = Path(path) if Path(path).is_dir() else _download(str(path))
            name, options = str(self._folder), dict[str, str]()
            if not Path(path).is_dir() and (self._folder / "config.json").is_file():
                # With a model's config.json the name on the hub may decide about the class; the files are the same.
                name = str(path)
                options = {"revision": self._folder.name, "cache_dir": str(self._folder.parents[2])}
            self._model: Any = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        except Exception as error:
            # transformers raises many kinds here: OSError, ValueError, KeyError, JSON and Rust exceptions.
            raise DataError(f"no tokenizer can be loaded from {path}: {type(error).__name__}: {error}") from error
        if self._model.eos_token_id is None:
            raise DataError(
                f"tokenizer {path} has no end-of-sentence token, which marks the end of a document; set eos_token in "
                f"its tokenizer_config.json"
            )
        self._model.model_max_length = int(1e30)  # documents are cut into samples later; no warning per document
        self.vocab_size = max(len(self._model), self._model.eos_token_id + 1)
        self.end_of_document = self._model.eos_token_id
        # Where it is the end of a document too, as GPT-2's, text never becomes it.
        self.unknown = self._model.unk_token_id
        self.beginning_of_document = self._model.bos_token_id
        self._backend = self._find_backend()
        if Path(path).is_dir():
            self.checksum = checksum_tokenizer(self.kind, path)
        else:
            with tempfile.TemporaryDirectory() as folder:
                self.save(Path(folder))
                self.checksum = checksum_tokenizer(self.kind, folder)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text."""
        if self._backend is not None:
            return self._backend.encode(texts)
        return self._model(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def begins_texts(self) -> bool:
        """Whether its own template puts its beginning-of-sequence token before a text, as Llama's does."""
        ids = list(self._model("a")["input_ids"])
        return self.beginning_of_document is not None and ids[:1] == [self.beginning_of_document]

    def count_unknown(self, text: str) -> int:
        """Number of characters that become unknown ids; of a tokenizer with Python code the share of these ids."""
        if self._backend is None or self.unknown is None:
            return super().count_unknown(text)
        return self._backend.count_characters(text, self.unknown)

    def worker_files(self, folder: Path, scratch: Path) -> tuple[str, Path]:
        """Write the backend if it does all the encoding: workers then need no `transformers`."""
        if self._backend is None:
            return self.kind, folder
        self._backend.save(scratch / "backend")
        return self._backend.kind, scratch / "backend"

    def _find_backend(self) -> BackendTokenizer | None:
        """The Rust tokenizer if it does all the encoding, or None if Python code takes part."""
        from transformers import PreTrainedTokenizerFast

        kind = type(self._model)
        whole = isinstance(self._model, PreTrainedTokenizerFast) and all(
            getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None)
            for name in ("__call__", "_encode_plus", "_batch_encode_plus", "encode")
        )
        if not whole:
            return None
        return BackendTokenizer(self._model.backend_tokenizer.to_str(), self.vocab_size, self.end_of_document)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        kept = [int(token) for token in ids if token != self.end_of_document]
        return self._model.decode(kept, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Copy the files that it was loaded from, byte for byte, whatever `transformers` would write today.

        Raises:
            DataError: what is loaded from the copy gives other ids, whatever class it names.
        """
        copy_tokenizer_files(self._folder, folder, self._model.vocab_files_names.values())
        complete_tokenizer(self._folder, folder, self._model)


def _download(name: str) -> Path:
    """The folder of a tokenizer of the hub, in the hub's cache."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=_ON_THE_HUB))


def copy_tokenizer_files(source: Path, target: Path, further: Iterable[str] = ()) -> list[Path]:
    """Copy the files of a Hugging Face tokenizer from a folder, which may be a model's; returns the new paths.

    ``further``: names that the tokenizer's class has for some of them.
    """
    target.mkdir(parents=True, exist_ok=True)
    found = [path for path in sorted(source.iterdir()) if path.is_file()]
    return [
        Path(shutil.copyfile(path, target / path.name))
        for path in found
        if path.name.startswith("tokenizer") or path.name in (*_FURTHER_FILES, *further)
    ]


def complete_tokenizer(source: Path, target: Path, model: Any = None) -> None:
    """Write its class into copied files of a Hugging Face tokenizer from which `transformers` would load another.

    `transformers` decides by the name on the hub and by the ``config.json`` of a model too, which the copy has not.

    Args:
        model: the tokenizer as `transformers` loads it; None: from ``source``.

    Raises:
        DataError: `transformers` loads none from ``source``, or another one from the copy with this class too.
    """
    model = _load_model(source) if model is None else model
    path = target / TOKENIZER_CONFIG
    try:
        content = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"file {path} cannot be read as JSON: {error}") from error
    wanted = _behaviour(model)
    if (content.get("tokenizer_class") or not (source / "config.json").is_file()) and _loads(target, wanted):
        return
    kind = type(model).__name__
    if kind == "TokenizersBackend":
        kind = "PreTrainedTokenizerFast"  # its name before transformers 5, which knows both
    path.write_text(json.dumps({**content, "tokenizer_class": kind}, indent=2) + "\n", encoding="utf-8")
    if not _loads(target, wanted):
        raise DataError(
            f"the tokenizer of {source} gives other ids without the config.json of the model, also as {kind}: save it "
            "by AutoTokenizer.from_pretrained(...).save_pretrained(DIR) and give DIR"
        )


def _load_model(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise DataError(f"no tokenizer can be loaded from {folder}: {type(error).__name__}: {error}") from error


def _loads(folder: Path, wanted: tuple[Any, ...]) -> bool:
    """Whether the tokenizer of a folder can be loaded and behaves as wanted."""
    try:
        return _behaviour(_load_model(folder)) == wanted
    except DataError:
        return False


def _behaviour(model: Any) -> tuple[Any, ...]:
    """Properties that determine ids: the class, special ids, ids of some texts, and the definition of the Rust part."""
    special = (len(model), model.bos_token_id, model.eos_token_id, model.unk_token_id)
    ids = model(list(PROBES), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # Last: the first call sets truncation and padding, which are part of the definition.
    definition = model.backend_tokenizer.to_str() if hasattr(model, "backend_tokenizer") else None
    return type(model), special, ids, definition


class BackendTokenizer(Tokenizer):
    """The Rust part of a Hugging Face tokenizer, without `transformers`, from the JSON of a `tokenizers.Tokenizer`.

    It returns the same ids as `transformers`, without computing token offsets, and loads without importing
    `transformers`, which takes longer than the start of Python.
    """

    kind = "backend"

    def __init__(self, definition: str, vocab_size: int, end_of_document: int) -> None:
        import tokenizers

        self._definition = definition
        self._model = tokenizers.Tokenizer.from_str(definition)
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # special tokens in text stay text; not part of the definition
        self.vocab_size = vocab_size
        self.end_of_document = end_of_document
        self.checksum = xxhash.xxh3_64_hexdigest(f"{vocab_size} {end_of_document} {definition}".encode())

    @classmethod
    def load(cls, path: Path | str) -> BackendTokenizer:
        """Read what `save` wrote."""
        content = parse_json((Path(path) / BACKEND_FILE).read_text(encoding="utf-8"))
        return cls(content["definition"], content["vocab_size"], content["end_of_document"])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text."""
        return [found.ids for found in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count_characters(self, text: str, token: int) -> int:
        """Number of characters of a text that became one id."""
        found = self._model.encode(text, add_special_tokens=False)
        return sum(end - start for id_, (start, end) in zip(found.ids, found.offsets, strict=True) if id_ == token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an end-of-document id gives no text."""
        kept = [int(token) for token in ids if token != self.end_of_document]
        return self._model.decode(kept, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write one file."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "definition": self._definition,
            "vocab_size": self.vocab_size,
            "end_of_document": self.end_of_document,
        }
        (folder / BACKEND_FILE).write_text(json.dumps(content), encoding="utf-8")


def load_tokenizer(kind: str, path: Path | str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        kind: ``sentencepiece``, ``huggingface`` or ``backend`` (in worker processes).
        path: a model file, a folder, or for huggingface a name on the hub.

    Raises:
        DataError: no usable tokenizer, or no token that can end a document.
    """
    kinds: dict[str, Callable[[Path | str], Tokenizer]] = {
        "sentencepiece": SentencePieceTokenizer,
        "huggingface": HuggingFaceTokenizer,
        "backend": BackendTokenizer.load,
    }
    if kind not in kinds:
        raise ValueError(f"tokenizer kind {kind!r} is not one of {sorted(kinds)}")
    return kinds[kind](path)


@dataclass(frozen=True)
class RoundTrip:
    """Counts of characters of a sample of text that was encoded and decoded.

    ``changed``: number of characters that decoding loses, or adds if those are more; ``unknown``: number of characters
    that become unknown ids.
    """

    num_characters: int
    changed: int
    unknown: int


def measure_round_trip(tokenizer: Tokenizer, texts: Sequence[str]) -> RoundTrip:
    """Encode texts, decode the ids, and count the characters, wherever they are, that are not the same."""
    changed = 0
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        before, after = Counter(text), Counter(tokenizer.decode(ids))
        changed += min(len(text), max((before - after).total(), (after - before).total()))
    # A normalisation may make several unknown characters of one.
    unknown = sum(min(len(text), tokenizer.count_unknown(text)) for text in texts)
    return RoundTrip(sum(map(len, texts)), changed, unknown)


def kind_of_files(path: Path | str) -> str:
    """Kind of the tokenizer in a file or folder: ``huggingface`` if a folder holds files of that kind.

    Such a folder may hold a SentencePiece model too, which ``transformers`` does not need.
    """
    signs = ("tokenizer.json", "vocab.json", TOKENIZER_CONFIG)
    return "huggingface" if any((Path(path) / name).is_file() for name in signs) else "sentencepiece"


def checksum_tokenizer(kind: str, path: Path | str) -> str:
    """The XXH3-64 of a tokenizer's local files, without loading it.

    Raises:
        DataError: there is no such file.
    """
    root = Path(path)
    if kind == "sentencepiece":
        files = [root / SENTENCEPIECE_FILE if root.is_dir() else root]
    else:
        files = sorted(file for file in root.glob("*") if file.is_file() and not file.name.startswith("."))
    state = xxhash.xxh3_64()
    for file in files:
        if not file.is_file():
            raise DataError(f"tokenizer file {file} is missing")
        content = file.read_bytes()
        # A single model file may have any name; of several files the names matter too.
        state.update(b"" if kind == "sentencepiece" else f"{file.name}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()


def train_sentencepiece(texts: Iterable[str], path: Path, vocab_size: int, model_type: str = "bpe") -> None:
    """Train a SentencePiece model and write it atomically; the same texts give the same bytes.

    Characters that no piece covers are encoded as bytes (byte fallback), so that every text can be encoded; pieces may
    consist of whitespace, which is frequent in source code.

    Args:
        vocab_size: number of pieces; including 256 bytes, the unknown piece and the end-of-document piece.
        model_type: ``bpe`` or ``unigram``.

    Raises:
        DataError: the texts do not support so many pieces, or need more; with SentencePiece's message.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chunks(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=16384,
            num_threads=1,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_DOCUMENT_PIECE,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"no SentencePiece model with {vocab_size} pieces can be trained on this text: {error}"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, "wb") as file:
        file.write(model.getvalue())


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts to a length that SentencePiece accepts; tabs and NULs, which it reserves, stay byte pieces."""
    for text in texts:
        for part in text.replace("\0", "\t").split("\t"):
            for start in range(0, len(part), TRAIN_CHUNK_CHARACTERS):
                yield part[start : start + TRAIN_CHUNK_CHARACTERS]
