"""Export of a checkpoint as a folder that ``transformers`` loads, without GPUs, with one layer in memory at a time.

Export of a tokenizer to one that ``transformers.AutoTokenizer`` loads, with the same ids.

A Hugging Face tokenizer's files are copied. A SentencePiece model is written as a ``tokenizers`` model; it is kept only
if it gives the same ids on test texts. Otherwise only the ``.model`` file is written. What the written
files do with a text is found by encoding (``describe_encoding``).
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megasdc.checkpoint.hf_shards import HfShards
from megasdc.checkpoint.tensor_files import num_bytes, write_tensors
from megasdc.checkpoint.verify import Standing, find_standing
from megasdc.checkpoint.weights import (
    GENERATION_FILE,
    TOKENIZER_FOLDER,
    InitialWeights,
    WeightSource,
    open_weights,
    same_tokenizer,
)
from megasdc.common.durable import TEMPORARY_PREFIX, commit_folder, remove_entry, write_durably
from megasdc.common.errors import CheckpointError, ConfigError, DataError, MegasdcError, StorageError
from megasdc.common.program import parts_bar
from megasdc.data.tokenizer import (
    PROBES,
    SENTENCEPIECE_FILE,
    SentencePieceTokenizer,
    Tokenizer,
    checksum_tokenizer,
    kind_of_files,
    load_tokenizer,
)
from megasdc.interchange.compare_logits import LogitsComparison, compare_logits
from megasdc.model.hf.classes import hf_class, hf_config
from megasdc.model.hf.tensors import hf_shapes, num_pipeline_layers, to_hf
from megasdc.tensors.bits import are_finite, dtype_name


@dataclass(frozen=True)
class Encoding:
    """How ``AutoTokenizer`` of an exported folder gives the ids of prepared data.

    Args:
        call: Python expression that gives them; None: none does.
        text: text for the export's ``README.md``.
        adds: whether ``tokenizer(text)`` alone adds or lacks ids, rather than taking text for special tokens.
    """

    call: str | None
    text: str
    adds: bool


def describe_encoding(tokenizer: Tokenizer, folder: Path, beginning: int | None, whose: str) -> Encoding:
    """Compare ``AutoTokenizer`` of an exported folder, which holds the model's configuration too, with the tokenizer.

    Args:
        tokenizer: tokenizer of the prepared data.
        folder: the exported folder.
        beginning: id that was put before every document; None: none.
        whose: name of the data with the tokenizer's ids, for the text, such as "the data of training".
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
        None if ``AutoTokenizer`` gives the same ids; else the reason why it cannot be used, with the remedy.
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


DataType = Literal["fp32", "bf16", "as-saved"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXPORTED_BY = "Exported by megasdc"
"""Text in the README.md of every export: a folder without it is not replaced."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportResult:
    """Result of an export; ``num_parameters`` is without padding, and counts tied ones once.

    ``step`` is None for initial weights. ``tokenizer`` is ``auto`` if AutoTokenizer loads it, and some call of it gives
    the same ids; ``note``: what is to be known of it, such as that call where it is not the plain one. ``logits``:
    comparison with ``transformers``. ``standing``: whether an audit has verified the checkpoint; None: no audits are in
    use there.
    """

    source: str
    step: int | None
    path: str
    architecture: str
    dtype: str
    num_parameters: int
    files: list[str]
    size_bytes: int
    tokenizer: Literal["auto", "model file"]
    note: str | None
    logits: LogitsComparison
    standing: Standing | None = None

    def render(self) -> str:
        """The result as text."""
        of = "initial weights" if self.step is None else f"step {self.step}"
        lines = [
            f"{self.path}: {self.architecture}, {self.num_parameters:,} parameters, {self.dtype}, "
            f"{len(self.files)} file{'s' if len(self.files) != 1 else ''}, {self.size_bytes / 1e6:.1f} MB, "
            f"from {self.source} ({of})"
        ]
        lines.append(self.logits.render())
        lines += [] if self.standing is None else [f"checkpoint: {self.standing}"]
        return "\n".join(lines if self.note is None else [*lines, f"tokenizer: {self.note}"])


def parse_size(text: str) -> int:
    """Bytes of a text such as ``2GB`` (10^9), ``500MiB`` or ``1000000``; ConfigError if it is no size, or 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        raise ConfigError(f"--max-shard-size: got {text!r}; allowed: a number above 0 with KB, MB, GB, KiB, MiB or GiB")
    return size


def find_tokenizer(weights: WeightSource, given: Path | str | None = None) -> Tokenizer:
    """The tokenizer that weights were trained with.

    Initial weights come with a tokenizer, already verified; if another is given, their ids are compared.

    Args:
        weights: a checkpoint, with the tokenizer in its prepared data, or initial weights, with their own.
        given: a folder or file to use instead.

    Raises:
        DataError: it is missing, or not the one that the weights were trained with.
    """
    if weights.config is None:
        own = weights.path / TOKENIZER_FOLDER
    else:
        own = Path(weights.config["megasdc"]["data"]["path"]) / "tokenizer"
    folder = own if given is None else Path(given)
    if given is not None and not folder.exists():
        raise DataError(f"--tokenizer: {folder} is not there; give a folder with a tokenizer's files, or a .model file")
    if not folder.exists():
        raise DataError(
            f"the tokenizer {folder} of {weights.path} is not there; give it with --tokenizer, or start in the folder "
            "that the run was started in"
        )
    model_file = folder if folder.is_file() else folder / SENTENCEPIECE_FILE
    known = model_file.is_file() and checksum_tokenizer("sentencepiece", model_file) == weights.tokenizer_checksum
    tokenizer = load_tokenizer("sentencepiece" if known else kind_of_files(folder), folder)
    if tokenizer.vocab_size > weights.vocab_size:
        raise DataError(
            f"tokenizer {folder} has {tokenizer.vocab_size} entries, the model of {weights.path} only "
            f"{weights.vocab_size}: it is another tokenizer; give the right one with --tokenizer"
        )
    if isinstance(weights, InitialWeights):
        if given is not None and weights.manifest.tokenizer_vocab_size is not None:
            _compare_ids(tokenizer, folder, own)
        return tokenizer
    # Different files can define the same Hugging Face tokenizer, so only vocabularies are compared.
    if tokenizer.kind == "sentencepiece":
        same = weights.tokenizer_checksum in (None, tokenizer.checksum)
    else:
        same = same_tokenizer("huggingface", folder, own)
    if not same:
        raise DataError(
            f"tokenizer {folder} has checksum {tokenizer.checksum}, {weights.path} was trained with "
            f"that of checksum {weights.tokenizer_checksum}: it is another one; give the right one with --tokenizer"
        )
    return tokenizer


def beginning_of_document(weights: WeightSource, tokenizer: Tokenizer) -> int | None:
    """The id that stood before every document in the training of weights; None: none, or they are not of a run."""
    trained = weights.config is not None and weights.config["megasdc"]["data"].get("bos")
    return tokenizer.beginning_of_document if trained else None


def _compare_ids(tokenizer: Tokenizer, folder: Path, own: Path) -> None:
    """DataError unless a tokenizer gives the same ids as the one of the imported weights; file names do not matter."""
    theirs = load_tokenizer(kind_of_files(own), own)
    for text in PROBES:
        if (given := tokenizer.encode([text])) != (needed := theirs.encode([text])):
            raise DataError(
                f"tokenizer {folder} gives other ids than {own}, with which the weights came: of {text[:20]!r} "
                f"{given[0][:5]}... instead of {needed[0][:5]}...; give the right one with --tokenizer, or none"
            )


def check_out(out: Path, force: bool, sign: str, text: str, source: Path | str) -> None:
    """Refuse to overwrite an existing output, with a ConfigError, unless ``force`` is set and this command made it.

    That is so if the folder has a file ``sign`` with ``text`` in it; an empty folder needs no force. ``source``, which
    is read, must not lie in ``out``.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise ConfigError(f"OUT: {out} is a file; give another folder")
    if not force:
        raise ConfigError(f"OUT: {out} is there already; give another folder, or --force to replace it")
    if Path(source).resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"OUT: {out} holds {source}, which is to be read; give another folder")
    if not (out / sign).is_file() or text not in (out / sign).read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"OUT: {out} was not made by this command, so --force does not replace it; give another folder"
        )


def export_hf(
    source: Path | str,
    out: Path | str,
    *,
    dtype: DataType = "as-saved",
    max_shard_size: str = "2GB",
    tokenizer: Path | str | None = None,
    force: bool = False,
    progress: bool = False,
) -> ExportResult:
    """Write a model as ``GPT2LMHeadModel`` or ``LlamaForCausalLM`` with its tokenizer.

    The folder is written under a temporary name and renamed when complete. Memory holds one unsharded layer and its
    converted form, whatever the size of the model (peak resident memory while exporting 536 MB of weights in 40 layers:
    18 MB above what the interpreter with its modules had); the vocabulary's padding is cut off.

    Args:
        source: a checkpoint of any layout, a folder of checkpoints (newest complete one), or imported initial weights.
        dtype: type of the tensors; ``as-saved``: the type that the model was trained in. Of a bf16 run the values are
            those of the bf16 weights, not of the optimizer's fp32 copies.
        max_shard_size: bytes of one safetensors file, such as ``2GB``; a larger tensor gets a file of its own.
        tokenizer: folder or file of the tokenizer; None: that of the prepared data.
        force: whether an earlier export is replaced.
        progress: whether bars are drawn on standard error where it is a terminal.

    Raises:
        ConfigError: no class of ``transformers`` can express the model, a bad argument, ``out`` exists, or
            ``transformers`` computes other logits.
        CheckpointError: no usable checkpoint; names the damaged files, or the weights that are not finite.
        DataError: the tokenizer is missing or a different one.
        StorageError: ``out`` cannot be written.
    """
    target, limit = Path(out).absolute(), parse_size(max_shard_size)
    if dtype not in (*_DTYPES, "as-saved"):
        raise ConfigError(f"--dtype: got {dtype!r}; allowed: fp32, bf16, as-saved")
    check_out(target, force, "README.md", EXPORTED_BY, source)
    weights: WeightSource = open_weights(source, progress=progress, accept=hf_class)
    if target.resolve().is_relative_to(weights.path.resolve()):
        raise ConfigError(f"OUT: {out} lies in {weights.path}, which is to be read; give another folder")
    words = find_tokenizer(weights, tokenizer)
    own, beginning = isinstance(weights, InitialWeights) and tokenizer is None, beginning_of_document(weights, words)
    plan = [_plan_layer(weights, index, dtype) for index in range(num_pipeline_layers(weights.model))]
    shards = divide({name: tensor for layer in plan for name, tensor in layer.items()}, limit)
    saved = next(iter(plan[0].values())).dtype
    with writing_folder(target) as folder:
        with parts_bar("exporting", len(plan), quiet=not progress) as advance:
            _write_shards(folder, shards, _stream(weights, len(plan), dtype, advance))
        note = None if own and words.kind == "huggingface" else export_tokenizer(words, folder, beginning)
        if own:  # what came with the weights goes with them, byte for byte
            for file in sorted((weights.path / TOKENIZER_FOLDER).iterdir()):
                shutil.copyfile(file, folder / file.name)
        special = _special_ids(weights, beginning, words)
        _write_configs(folder, weights, special, words.end_of_document, dtype_name(saved))
        encoding = None if note is not None else _encoding(weights, words, folder, beginning)
        if encoding is not None and (encoding.adds or encoding.call is None):
            note = encoding.text
        exported = HfShards(folder)
        exported.check(weights.model, hf_shapes(weights.model, weights.vocab_size))
        result = ExportResult(
            source=str(weights.path),
            step=weights.step,
            path=str(target),
            architecture=hf_class(weights.model),
            dtype=dtype_name(saved),
            num_parameters=sum(tensor.numel() for shard in shards.values() for tensor in shard.values()),
            files=list(shards),
            size_bytes=sum((folder / name).stat().st_size for name in shards),
            tokenizer="auto" if encoding is not None and encoding.call is not None else "model file",
            note=note,
            logits=compare_logits(weights, exported, rounded_to=_DTYPES.get(dtype), progress=progress),
            standing=find_standing(weights.path),
        )
        text = encoding.text if encoding is not None else note or ""
        _write_readme(folder, weights, special.text, text, result)
    return result


def _encoding(weights: WeightSource, tokenizer: Tokenizer, folder: Path, beginning: int | None) -> Encoding:
    whose = "data that `megasdc prepare-data` makes with it" if weights.config is None else "the data of training"
    return describe_encoding(tokenizer, folder, beginning, whose)


@contextmanager
def writing_folder(target: Path) -> Iterator[Path]:
    """Context that creates a folder under a temporary name, renames it at the end, and removes it after an error.

    StorageError if it cannot be written.
    """
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    try:
        remove_entry(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        commit_folder(temporary, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space or choose another folder" if full else "choose another folder"
        raise StorageError(f"{target} cannot be written: {error.strerror or error}; {remedy}") from error
    finally:
        with contextlib.suppress(OSError):  # its parent is a file, or may not be written: nothing was begun
            remove_entry(temporary)


def divide(tensors: dict[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    """Divide tensors (meta suffices) into files of at most ``limit`` bytes, in order; a larger one gets its own.

    Returns the tensors of each file, by file name as ``transformers`` expects it.
    """
    groups: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not groups or size + num_bytes(tensor) > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += num_bytes(tensor)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _plan_layer(weights: WeightSource, index: int, dtype: DataType) -> dict[str, Tensor]:
    return _convert_layer(weights, index, dtype, "meta")


def _convert_layer(weights: WeightSource, index: int, dtype: DataType, device: str) -> dict[str, Tensor]:
    layer = weights.layer(index, device)
    found = to_hf(weights.model, index, layer) if layer else {}
    return found if dtype == "as-saved" else {name: tensor.to(_DTYPES[dtype]) for name, tensor in found.items()}


def _stream(
    weights: WeightSource, layers: int, dtype: DataType, advance: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    for index in range(layers):
        layer = _convert_layer(weights, index, dtype, "cpu")
        if not are_finite(layer.values()):
            raise _not_finite(weights, index, layer)
        for name in list(layer):
            yield name, layer.pop(name)
        advance()


def _not_finite(weights: WeightSource, index: int, layer: dict[str, Tensor]) -> CheckpointError | ConfigError:
    """The error for a layer that has weights with NaN or Inf, or finite ones that are too large for another type."""
    saved = to_hf(weights.model, index, weights.layer(index))
    name = next(name for name, tensor in layer.items() if not are_finite([tensor]))
    count, all_of = int((~torch.isfinite(layer[name])).sum()), layer[name].numel()
    if are_finite([saved[name]]):
        return ConfigError(
            f"--dtype: {count} of {all_of} elements of {name} of {weights.path} are too large for "
            f"{dtype_name(layer[name].dtype)}: give as-saved, which is {dtype_name(saved[name].dtype)}; nothing was "
            "exported"
        )
    return CheckpointError(
        f"{name} of {weights.path} has {count} of {all_of} elements that are not finite: it was saved after the model "
        "diverged, or was damaged before it was saved; export an earlier checkpoint. Nothing was exported"
    )


def _write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], stream: Iterator[tuple[str, Tensor]]) -> None:
    for file, plan in shards.items():
        write_tensors(folder / file, plan, (next(stream) for _ in range(len(plan))))
    next(stream, None)  # lets the generator finish, which advances the progress bar of the last layer
    if len(shards) > 1:
        total = sum(num_bytes(tensor) for plan in shards.values() for tensor in plan.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, plan in shards.items() for name in plan},
        }
        _write_json(folder / "model.safetensors.index.json", index)


@dataclass(frozen=True)
class _SpecialIds:
    """Ids of special tokens of an export, by their keys in ``config.json``.

    ``origin``: imported weights whose ``generation_config.json`` is passed on, if they have one; None: it is written
    from the ids. ``text``: text on them for the export's ``README.md``.
    """

    ids: Mapping[str, int | list[int] | None]
    origin: InitialWeights | None
    text: str


def _special_ids(weights: WeightSource, beginning: int | None, tokenizer: Tokenizer) -> _SpecialIds:
    """Ids that came with imported weights, also for a run that started from them, as far as it was trained with them.

    ``beginning``: the id before a document in training; None: there was none.
    """
    end = tokenizer.end_of_document
    ids: dict[str, int | list[int] | None] = {
        "bos_token_id": end if beginning is None else beginning,
        "eos_token_id": end,
    }
    if isinstance(weights, InitialWeights):
        if (imported := weights.manifest.token_ids) is None:  # an older import
            return _SpecialIds(ids, None, f"The id that ends a document is {end}.")
        return _SpecialIds(imported, weights, "Ids of special tokens are those that were imported.")
    before = "nothing was put before it" if beginning is None else f"began with token {beginning}"
    text = f"In training a document ended with token {end}, and {before}."
    path = (weights.config or {}).get("megasdc", {}).get("model", {}).get("initial_weights")
    if path is None:
        return _SpecialIds(ids, None, text)
    try:
        origin = InitialWeights(path)
    except CheckpointError:
        gone = f"It began with {path}, where no imported weights are now: what special ids these had is not known."
        return _SpecialIds(ids, None, f"{text} {gone}")
    imported, source = origin.manifest.token_ids or {}, origin.manifest.source
    ends = imported.get("eos_token_id")
    if end not in (ends if isinstance(ends, list) else [ends]):
        other = f"The eos_token_id of {source}, with which it began, is {json.dumps(ends)}: its ids are not kept."
        return _SpecialIds(ids, None, f"{text} {other}")
    try:
        _compare_ids(tokenizer, Path("that of the run"), origin.path / TOKENIZER_FOLDER)
    except MegasdcError:  # the folder has another model now, or no tokenizer came with it
        other = f"Now {path} is of {source}, without the tokenizer of the run: its ids are not kept."
        return _SpecialIds(ids, None, f"{text} {other}")
    kept = imported | ({} if beginning is None else {"bos_token_id": beginning})
    return _SpecialIds(kept, origin, f"{text} Ids of special tokens are those of {source}, with which it began.")


def _write_configs(folder: Path, weights: WeightSource, special: _SpecialIds, end: int, dtype: str) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    config = hf_config(weights.model, weights.vocab_size, end, dtype)
    config = {key: value for key, value in config.items() if key not in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", {**config, **special.ids})
    if special.origin is None:
        _write_json(folder / GENERATION_FILE, dict(special.ids))
    elif GENERATION_FILE in special.origin.manifest.files:
        special.origin.verify_file(GENERATION_FILE)
        shutil.copyfile(special.origin.path / GENERATION_FILE, folder / GENERATION_FILE)


def _write_readme(folder: Path, weights: WeightSource, ids: str, tokenizer: str, result: ExportResult) -> None:
    """Write ``README.md``; ``ids``, ``tokenizer``: texts on them."""
    of = f"imported from {weights.manifest.source}" if isinstance(weights, InitialWeights) else f"step {result.step}"
    text = (
        f"# {result.architecture}, {result.num_parameters:,} parameters\n\n{EXPORTED_BY}, {of}.\n{ids}\n\n"
        f"## Tokenizer\n\n{tokenizer}\n"
    )
    write_durably(folder / "README.md", text)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2) + "\n")
