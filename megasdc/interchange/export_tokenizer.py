"""Export of a tokenizer to one that ``transformers.AutoTokenizer`` loads, with the same ids.

A Hugging Face tokenizer's files are copied. A SentencePiece model is written as a ``tokenizers`` model; it is kept only
if it gives the same ids on test texts. Otherwise only the ``.model`` file is written. What the written
files do with a text is found by encoding (``describe_encoding``).
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.data.tokenizer import PROBES, SENTENCEPIECE_FILE, SentencePieceTokenizer, Tokenizer


@dataclass(frozen=True)
class Encoding:
    """How ``AutoTokenizer`` of an exported folder gives the ids of prepared data.

    Args:
        call: expression that gives them; None: none does.
        text: for the export's ``README.md``.
        adds: whether ``tokenizer(text)`` alone adds or lacks ids, rather than taking text for special tokens.
    """

    call: str | None
    text: str
    adds: bool


def describe_encoding(tokenizer: Tokenizer, folder: Path, beginning: int | None, whose: str) -> Encoding:
    """Compare ``AutoTokenizer`` of an exported folder, which holds the model's configuration too, with the tokenizer.

    Args:
        tokenizer: that of the prepared data.
        beginning: id that was put before every document; None: none.
        whose: what has the ids of the tokenizer, for the text, such as "the data of training".
    """
    import transformers

    try:
        theirs: Any = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        text = f"`AutoTokenizer` cannot load this tokenizer: {type(error).__name__}: {error}"
        return Encoding(None, text, True)
    texts = [*PROBES, inspect.getsource(json)]
    first = [] if beginning is None else [beginning]
    needed = [[*first, *ids] for ids in tokenizer.encode(texts)]
    plain = [_call(theirs, text, {}) for text in texts]
    options: tuple[dict[str, bool], ...] = ({}, {"add_special_tokens": False}, {"split_special_tokens": True})
    for before in ([], first) if first else ([],):
        for given in (*options, {**options[1], **options[2]}):
            if [[*before, *_call(theirs, text, given)] for text in texts] == needed:
                call = f"tokenizer({', '.join(['text', *(f'{key}={value}' for key, value in given.items())])})"
                call = f"{before} + {call}.input_ids" if before else f"{call}.input_ids"
                text = f"{whose[0].upper()}{whose[1:]} have the ids of `{call}` with `AutoTokenizer`."
                if before or given:
                    place = next(index for index, ids in enumerate(plain) if ids != needed[index])
                    text += (
                        f" `tokenizer(text)` alone gives others: of {texts[place][:20]!r} {plain[place][:5]}..., not "
                        f"{needed[place][:5]}..."
                    )
                return Encoding(call, text, bool(before) or "add_special_tokens" in given)
    place = next(index for index, ids in enumerate(plain) if ids != needed[index])
    text = (
        f"`AutoTokenizer` does not give the ids of {whose}: of {texts[place][:20]!r} {plain[place][:5]}..., not "
        f"{needed[place][:5]}..."
    )
    return Encoding(None, text, True)


def _call(tokenizer: Any, text: str, options: dict[str, bool]) -> list[int]:
    return list(tokenizer(text, **options)["input_ids"])


def export_tokenizer(tokenizer: Tokenizer, folder: Path, beginning: int | None = None) -> str | None:
    """Write the tokenizer of the prepared data into an exported model's folder, for ``transformers``.

    Args:
        beginning: id that was put before every document: ``AutoTokenizer`` of a SentencePiece model then adds it too.

    Returns:
        None if ``AutoTokenizer`` gives the same ids; else why it cannot be used and what to do.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)
        return None
    reason = None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _convert(tokenizer.model_file, Path(scratch), tokenizer.end_of_document, beginning)
            reason = _first_difference(tokenizer, Path(scratch), beginning)
        except Exception as error:  # a foreign model may hold anything; then only the .model file is written
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            for file in sorted(Path(scratch).iterdir()):
                shutil.copyfile(file, folder / file.name)
    tokenizer.save(folder)
    if reason is None:
        return None
    before = "" if beginning is None else f"[{beginning}] + "
    return (
        f"transformers cannot express this SentencePiece model with the same ids ({reason}); AutoTokenizer does not "
        f"work here. Tokenize with the sentencepiece package: "
        f'{before}SentencePieceProcessor(model_file="{SENTENCEPIECE_FILE}").encode(text)'
    )


def _convert(model_file: Path, folder: Path, end_of_document: int, beginning: int | None) -> None:
    """Write a SentencePiece model as ``tokenizer.json`` and ``tokenizer_config.json``."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, decoders, normalizers, processors
    from tokenizers import Tokenizer as FastTokenizer

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model_file.read_bytes())
    spec = proto.normalizer_spec
    fast = FastTokenizer(_bpe(proto) if proto.trainer_spec.model_type == 2 else _unigram(proto))
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("\u2581"))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", "\u2581"))
    fast.normalizer = normalizers.Sequence(steps)
    undo = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(undo)
    pieces = proto.pieces
    if beginning is not None:
        piece = pieces[beginning].piece
        fast.post_processor = processors.TemplateProcessing(
            single=[piece, "$A"], pair=[piece, "$A", piece, "$B"], special_tokens=[(piece, beginning)]
        )
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": pieces[end_of_document].piece,
        **({} if beginning is None else {"bos_token": pieces[beginning].piece}),
        "unk_token": pieces[proto.trainer_spec.unk_id].piece,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text that looks like a special token is text
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": int(1e30),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_NORMAL, _USER_DEFINED = 1, 4  # of SentencePiece's ModelProto.SentencePiece.Type
_NEVER = -1e6
"""Log probability of a piece that must never be chosen in text."""


def _bpe(proto: Any) -> Any:
    """BPE model: SentencePiece merges the pair whose joined piece scores best; every split of a piece is a pair."""
    from tokenizers import models

    vocab = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    plain = {piece.piece for piece in proto.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    ranked = sorted(
        (-piece.score, index, piece.piece) for index, piece in enumerate(proto.pieces) if piece.piece in plain
    )
    merges = [
        (piece[:cut], piece[cut:])
        for _, _, piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=proto.trainer_spec.byte_fallback)


def _unigram(proto: Any) -> Any:
    """Unigram model; control and byte pieces, which SentencePiece never finds in text, get a very low score."""
    from tokenizers import models

    usable = (_NORMAL, _USER_DEFINED)
    vocab = [(piece.piece, piece.score if piece.type in usable else _NEVER) for piece in proto.pieces]
    return models.Unigram(vocab, proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback)


def _first_difference(tokenizer: Tokenizer, folder: Path, beginning: int | None) -> str | None:
    """Compare ids on probes, standard library sources and a range of characters; None if all are equal."""
    import argparse
    import tarfile
    import unicodedata

    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    real = [inspect.getsource(module) for module in (argparse, tarfile, json)]
    every = "".join(chr(code) for code in range(32, 0x3000) if unicodedata.category(chr(code)) not in ("Cn", "Cs"))
    for text in [*PROBES, *real, every]:
        ours = ([] if beginning is None else [beginning]) + tokenizer.encode([text])[0]
        found = theirs(text)["input_ids"]
        if ours != found:
            place = next((i for i, (a, b) in enumerate(zip(ours, found, strict=False)) if a != b), None)
            return f"ids differ from place {place} on, in the text that begins {text[:20]!r}"
    return None
