"""A first configuration from a few answers: model, batch, learning rate and length by published rules.

What follows from the rest is left out of the file and is derived where it is loaded: the micro-batches of a step from
the ranks, warm-up and decay from the steps, the vocabulary from the prepared data, all else from defaults.

Sources: Radford et al. 2019 for GPT-2's four sizes; Brown et al. 2020 (arXiv 2005.14165), table 2.1, for shapes, batch
and learning rates of GPT-3; Hoffmann et al. 2022 (arXiv 2203.15556) for 20 tokens a parameter; Muennighoff et al. 2023
(arXiv 2305.16264) for text that is read up to four times.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError
from megasdc.common.words import number_of
from megasdc.config.data import SourceSection
from megasdc.config.model import PRESETS, ModelSection, ffn_width
from megasdc.data.manifest import MANIFEST_FILE, DataManifest
from megasdc.data.sources import fingerprint_source, list_files
from megasdc.model.sizes import model_sizes, padded_vocab_size

GPT2 = {124_000_000: "124m", 355_000_000: "355m", 774_000_000: "774m", 1_500_000_000: "1.5b"}
"""Numbers of parameters by which GPT-2's own shapes are known, with the names of their presets."""
GPT2_VOCABULARY = 50257
"""Entries of GPT-2's vocabulary, with which a model is counted whose tokenizer is not at hand."""
STDLIB, HUB, TRAIN = "stdlib", "hub:", "train"
NEAR = 0.05
"""Largest share by which a shape may differ from the number of parameters if its proportions are better."""
ALIKE = 1.6
"""Largest ratio of a width to 64 times its layers, or the other way round, with which wide heads are kept."""
WIDE = 5_000_000_000
"""Number of parameters from which heads have 128 channels and a model is 128 times as wide as deep, as GPT-3's 6.7B."""
MOST_TOKENS = 500_000
"""Tokens of a step from GPT-3's 125M on; below in proportion to the parameters."""
PER_PARAMETER, EPOCHS, BYTES_PER_TOKEN = 20, 4, 4
LARGEST_LR = 3e-3
MOST_STEPS_BETWEEN_SAVES = 1000
FEW_FILES = 100
"""Below so many files of plain text each paragraph is a document, so that three splits get some."""
COMPRESSED = 3
"""Bytes of text in a byte of a packed file, roughly."""
LINE = 100
_NUMBER = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_parameters(text: str) -> int:
    """Number of parameters in a text such as ``124m``, ``1.5b`` or ``124000000``.

    Raises:
        ValueError: it is none, or is not between 100k and 10t.
    """
    found = _NUMBER.fullmatch(text.strip())
    number = round(float(found["number"]) * _UNITS[found["unit"].lower()]) if found else 0
    if not 10**5 <= number <= 10**13:
        raise ValueError(f"got {text!r}, needed a number of parameters from 100k to 10t, such as 124m or 1.5b")
    return number


@dataclass(frozen=True)
class FirstAnswers:
    """What a first configuration is made of.

    Args:
        file: where it will lie; its name is that of the run folder and of the prepared data.
        text: ``stdlib``, ``hub:NAME``, a file, folder or glob of text, or a folder of prepared data.
        tokenizer: ``train`` or ``train:N``, a SentencePiece model, a folder, or a name on the Hugging Face hub; of
            prepared data it is theirs.
        parameters: number of parameters, see ``choose_shape``.
        ranks: number of ranks of the run.
        hostfile: their hosts; None: this one.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        protect: word of the section `megasdc`.
        steps: number of steps; None: see ``_steps``.
        samples: samples of a step; None: see ``_batch``.
        sequence_length: tokens of a sample.
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
    """

    file: Path
    text: str
    tokenizer: str
    parameters: int
    ranks: int
    hostfile: Path | None
    precision: str
    protect: str
    steps: int | None = None
    samples: int | None = None
    sequence_length: int = 512
    tensor: int = 1
    pipeline: int = 1

    @property
    def replicas(self) -> int:
        """Number of replicas, at least 1; whether the ranks divide is checked with the file."""
        return max(1, self.ranks // (self.tensor * self.pipeline))


@dataclass(frozen=True)
class Text:
    """Text of a run as its section `data` names it.

    Args:
        fields: of the section `data`.
        tokens: number of tokens for training; None: not known before it is read.
        vocabulary: entries of the tokenizer's vocabulary; None: not known before it is loaded.
        prepared: whether these are prepared data.
    """

    fields: dict[str, Any]
    tokens: int | None
    vocabulary: int | None
    prepared: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model.

    Args:
        fields: of the section `model`.
        parameters: number of its parameters with ``vocabulary`` entries.
    """

    fields: dict[str, Any]
    parameters: int
    vocabulary: int


@dataclass(frozen=True)
class FirstConfig:
    """A first configuration.

    Args:
        config: what the file holds.
        shape: of the model.
        notes: what to know about it, a sentence each.
        commands: the next three, and what each is for.
    """

    config: dict[str, Any]
    shape: ModelShape
    notes: list[str]
    commands: list[tuple[str, str]]

    @property
    def text(self) -> str:
        """The file, short: what fits on a line is on one."""
        return _json(self.config, 0, whole=("", "megasdc")) + "\n"


def propose_config(answers: FirstAnswers) -> FirstConfig:
    """Make a first configuration; nothing is written, and nothing is read but names and sizes of files of text.

    Raises:
        DataError: the text or the tokenizer is not there, or prepared data are damaged.
    """
    text = _find_text(answers)
    vocabulary = text.vocabulary or GPT2_VOCABULARY
    shape = choose_shape(answers.parameters, vocabulary, answers.tensor, answers.pipeline)
    if answers.sequence_length > ModelSection.model_validate(_with_preset(shape.fields)).max_positions:
        shape.fields["max_positions"] = answers.sequence_length
    samples, micro_batch = _batch(answers)
    steps = answers.steps or _steps(answers, samples, text.tokens)
    interval = max(1, min(MOST_STEPS_BETWEEN_SAVES, steps // 10))
    layout = {"tensor": answers.tensor, "pipeline": answers.pipeline}
    length = {} if answers.sequence_length == 512 else {"sequence_length": answers.sequence_length}
    config: dict[str, Any] = {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"params": {"lr": _learning_rate(answers.parameters)}},
    }
    if answers.precision != "fp32":
        config[answers.precision] = {"enabled": True}
    sections: dict[str, Any] = {"protect": answers.protect, "model": shape.fields, "data": {**text.fields, **length}}
    if layout := {name: size for name, size in layout.items() if size > 1}:
        sections["parallel"] = layout
    sections["training"] = {"steps": steps, "eval_interval": interval}
    sections["checkpoint"] = {"interval": interval}
    sections["logging"] = {"run_dir": f"runs/{answers.file.stem}"}
    config["megasdc"] = sections
    return FirstConfig(config, shape, list(_notes(answers, text, shape, config)), _commands(answers, text))


# --- the model ----------------------------------------------------------------------------------------------------


def choose_shape(parameters: int, vocabulary: int, tensor: int = 1, pipeline: int = 1) -> ModelShape:
    """Shape of a GPT with about so many parameters, by one rule.

    GPT-2's four sizes have GPT-2's shapes whatever the vocabulary, where the layout divides them. Of every other number
    those shapes are looked at whose heads have 64 channels and whose width is 32 to 128 times the number of layers; of
    those that are within 5 % of the number that one is taken whose width is nearest 64 times its layers, as of GPT-2's
    124M; if none is within ``ALIKE`` times that, heads of 32 and then of 16 channels are looked at, and at last the
    best of all is taken. From 5 billion on it is 128 channels and 128 times, as of GPT-3's 6.7B. Heads are a multiple
    of the tensor size, layers one of the stages.
    """
    if name := GPT2.get(parameters):
        preset = PRESETS[f"gpt2-{name}"]
        if preset["num_attention_heads"] % tensor == 0 and preset["num_layers"] % pipeline == 0:
            fields: dict[str, Any] = {"preset": f"gpt2-{name}"}
            return ModelShape(fields, _count(ModelSection.model_validate(preset), vocabulary), vocabulary)
    aspect = 128 if parameters >= WIDE else 64
    sizes = [128] if parameters >= WIDE else [64, 32, 16]  # channels of a head

    def rank(found: tuple[int, int, int, int]) -> tuple[float, float]:
        head, layers, heads, count = found
        off, proportion = abs(math.log(count / parameters)), abs(math.log(heads * head / (aspect * layers)))
        return (proportion, off) if abs(count / parameters - 1) <= NEAR else (math.inf, off)

    best = [
        min(((head, *one) for one in _shapes(parameters, vocabulary, (head, aspect), (tensor, pipeline))), key=rank)
        for head in sizes
    ]
    alike = [one for one in best if rank(one)[0] <= math.log(ALIKE)]
    head, layers, heads, count = alike[0] if alike else min(best, key=rank)
    fields = {"num_layers": layers, "hidden_size": heads * head, "num_attention_heads": heads}
    return ModelShape(fields, count, vocabulary)


def _shapes(
    parameters: int, vocabulary: int, proportions: tuple[int, int], layout: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield layers, heads and parameters of shapes that may be chosen: up to the first that is larger, at each depth.

    ``proportions``: channels of a head, width over layers; ``layout``: tensor size, stages.
    """
    (head, aspect), (tensor, pipeline), model = proportions, layout, ModelSection.model_validate({})
    layers = pipeline
    while True:
        first = -(-aspect * layers // (2 * head * tensor)) * tensor
        count = 0
        for heads in range(max(first, tensor), max(2 * aspect * layers // head, tensor) + 1, tensor):
            sizes = {"num_layers": layers, "hidden_size": heads * head, "num_attention_heads": heads}
            count = _count(model.model_copy(update=sizes), vocabulary)
            yield layers, heads, count
            if count > parameters:
                break
        if heads == max(first, tensor) and count > parameters:
            return  # already the narrowest is larger, and deeper ones are wider
        layers += pipeline


def _count(model: ModelSection, vocabulary: int) -> int:
    return model_sizes(model, ffn_width(model), padded_vocab_size(vocabulary, model.vocab_multiple)).total


def _with_preset(fields: dict[str, Any]) -> dict[str, Any]:
    return {**PRESETS.get(fields.get("preset", ""), {}), **fields}


# --- the text -----------------------------------------------------------------------------------------------------


def _find_text(answers: FirstAnswers) -> Text:
    """The section `data` of what was answered.

    Raises:
        DataError: it is not there.
    """
    where, own = answers.text, f"prepared/{answers.file.stem}"
    if (Path(where) / MANIFEST_FILE).is_file():
        manifest = DataManifest.load(where)
        tokens = manifest.splits["train"].num_tokens if "train" in manifest.splits else None
        return Text({"path": where}, tokens, manifest.tokenizer.vocab_size, prepared=True)
    fields: dict[str, Any] = {"path": own}
    size = None
    if where.startswith(HUB):
        fields["sources"] = [{"kind": "hub", "path": where.removeprefix(HUB)}]
    elif where == STDLIB:
        size = int(fingerprint_source(SourceSection.model_validate({}))["size_bytes"])
    else:
        source: dict[str, Any] = {"kind": "files", "path": where}
        paths = list_files(SourceSection.model_validate(source))
        size = sum(path.stat().st_size * (1 if _is_plain(path) else COMPRESSED) for path in paths)
        if len(paths) < FEW_FILES and all(path.suffix == ".txt" for path in paths):
            source["text_unit"] = "paragraph"
        fields["sources"] = [source]
    tokenizer, vocabulary = _tokenizer(answers.tokenizer, size)
    if tokenizer:
        fields["tokenizer"] = tokenizer
    return Text(fields, None if size is None else size // BYTES_PER_TOKEN, vocabulary)


def _is_plain(path: Path) -> bool:
    return path.suffix in (".txt", ".jsonl", ".ndjson", ".json")


def _tokenizer(answer: str, size: int | None) -> tuple[dict[str, Any], int | None]:
    """The section `tokenizer`, and its vocabulary: of one to train 8192 entries, of little text fewer.

    ``size``: bytes of the text; None: not known.
    """
    from megasdc.data.tokenizer import kind_of_files, load_tokenizer

    kind, _, number = answer.partition(":")
    if kind == TRAIN and (not number or number.isdecimal()):
        entries = 8192
        while not number and size is not None and entries > 512 and size < 256 * entries:
            entries //= 2
        entries = int(number or entries)
        return ({} if entries == 8192 else {"vocab_size": entries}), entries
    if Path(answer).exists():
        kind = kind_of_files(answer)
        return {"kind": kind, "path": answer}, load_tokenizer(kind, answer).vocab_size
    if answer.startswith((".", "/")) or answer.endswith(".model"):
        raise DataError(f"tokenizer {answer} is not there; give train, train:N, a file, a folder or a name on the hub")
    return {"kind": "huggingface", "path": answer}, None


# --- batch, learning rate, length ---------------------------------------------------------------------------------


def _batch(answers: FirstAnswers) -> tuple[int, int]:
    """Samples of a step and of a micro-batch.

    A step has half a million tokens from 124 million parameters on, below in proportion (Brown et al. 2020), in
    micro-batches of 4 samples, from a billion parameters on of one; smaller ones where each replica would get fewer
    than two of them, so that the file also trains on twice as many ranks.
    """
    tokens = MOST_TOKENS * min(1.0, answers.parameters / 124e6)
    wanted = answers.samples or round(tokens / answers.sequence_length)
    micro_batch = 4 if answers.parameters < 10**9 else 1
    while micro_batch > 1 and (2 * micro_batch * answers.replicas > wanted or (answers.samples or 0) % micro_batch):
        micro_batch //= 2
    unit = 2 * micro_batch * answers.replicas
    return answers.samples or max(1, round(wanted / unit)) * unit, micro_batch


def _steps(answers: FirstAnswers, samples: int, tokens: int | None) -> int:
    """Steps of 20 tokens a parameter (Hoffmann et al. 2022), but the text four times at most (Muennighoff et al.)."""
    wanted = min(PER_PARAMETER * answers.parameters, math.inf if tokens is None else EPOCHS * tokens)
    return max(10, _two_digits(wanted / (samples * answers.sequence_length)))


def _two_digits(value: float) -> int:
    digits = max(0, math.floor(math.log10(max(value, 1))) - 1)
    return round(value / 10**digits) * 10**digits


def _learning_rate(parameters: int) -> float:
    """6e-4 at 124 million parameters, and less by the cube root of their number: GPT-3's table within 40 %."""
    return float(f"{min(LARGEST_LR, 6e-4 * (124e6 / parameters) ** (1 / 3)):.2g}")


# --- what is said -------------------------------------------------------------------------------------------------


def _notes(answers: FirstAnswers, text: Text, shape: ModelShape, config: dict[str, Any]) -> Iterator[str]:
    model = ModelSection.model_validate(_with_preset(shape.fields))
    known = "" if text.vocabulary else ", GPT-2's, since this tokenizer is loaded only when text is prepared"
    yield (
        f"model: {number_of(model.num_layers, 'layer')} x {model.hidden_size:,}, "
        f"{number_of(model.num_attention_heads, 'head')}: {shape.parameters:,} parameters with a vocabulary of "
        f"{shape.vocabulary:,}{known}; {answers.parameters:,} were asked for"
    )
    steps, samples = config["megasdc"]["training"]["steps"], config["train_batch_size"]
    trained = steps * samples * answers.sequence_length
    passes = f", {trained / text.tokens:.2g} times the text" if text.tokens else ""
    yield (
        f"length: {number_of(steps, 'step')} of {number_of(samples, 'sample')} of {answers.sequence_length:,} tokens, "
        f"{trained:,} tokens{passes}; --steps, --samples and --sequence-length give other numbers"
    )
    if text.prepared and answers.tokenizer != TRAIN:
        yield f"tokenizer: that of the prepared data in {answers.text}; {answers.tokenizer} is not used"
    folder = Path(config["megasdc"]["logging"]["run_dir"])
    if (folder / "resolved.json").is_file():
        yield f"{folder} holds a run: a launch goes on with it, or refuses another model; another FILE has its own"


def _commands(answers: FirstAnswers, text: Text) -> list[tuple[str, str]]:
    file = shlex.quote(str(answers.file))
    where = f"--num-ranks {answers.ranks}"
    if answers.hostfile is not None:
        where = f"--hostfile {shlex.quote(str(answers.hostfile))}"
    launch = f"megasdc launch {where} --config {file}"
    first = [] if text.prepared else [(f"megasdc prepare-data --config {file}", "text -> tokenizer -> token files")]
    last = [(f"megasdc summary runs/{shlex.quote(answers.file.stem)}", "what it came to, or why it failed")]
    dry = (f"{launch} --dry-run", "check hosts, data and layout; start nothing")
    return [*first, dry, (launch, "train; the same command resumes"), *last][:3]


def _json(value: Any, depth: int, name: str = "", whole: tuple[str, ...] = ()) -> str:
    """JSON in which an object is on one line where it fits, unless its name is one of ``whole``."""
    line = json.dumps(value)
    pad = "  " * (depth + 1)
    fits = len(pad) + len(name) + 4 + len(line) <= LINE
    if not isinstance(value, dict) or (fits and name not in whole):
        return line
    parts = [f"{pad}{json.dumps(key)}: {_json(inner, depth + 1, key, whole)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(parts) + "\n" + "  " * depth + "}"
