"""Do trained weights reach Hugging Face and come back, from every layout, and does bad input end with its code?"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from tiny import LLAMA_STYLE
from whole_runs import metrics_of, prepare_text, train_run, write_config

from megasdc.checkpoint.weights import load_weights, open_weights
from megasdc.cli import main
from megasdc.common.errors import CheckpointError, ConfigError, DataError, StorageError
from megasdc.data.dataset import build_split
from megasdc.data.loader import EvalLoader
from megasdc.data.manifest import DataManifest
from megasdc.data.tokenizer import load_tokenizer, train_sentencepiece
from megasdc.interchange.export_hf import divide, export_hf, parse_size
from megasdc.interchange.import_hf import import_hf

pytestmark = pytest.mark.distributed

_GPT: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": _GPT,
    "gpt_3_heads": {**_GPT, "hidden_size": 48, "num_attention_heads": 3},
    "llama": {**_GPT, **LLAMA_STYLE, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2},
    "llama_3_groups": {**_GPT, **LLAMA_STYLE, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 3},
}
DEFAULT = [
    ("gpt", (1, 1, 1)),
    ("gpt", (2, 2, 1)),
    ("gpt_3_heads", (1, 2, 1)),
    ("llama", (2, 1, 1)),
    ("llama_3_groups", (1, 1, 2)),
]
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
FULL = [(name, layout) for name in ("gpt", "llama") for layout in LAYOUTS if (name, layout) not in DEFAULT]
CASES = [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
SAMPLES = 4
Trained = Callable[[str, tuple[int, int, int]], Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text with 500 vocabulary entries, which are padded to 512."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trained:
    """Returns the run folder of a model that was trained for two steps at a layout, once a session."""
    known: dict[Any, Path] = {}

    def train(name: str, layout: tuple[int, int, int]) -> Path:
        if (name, layout) not in known:
            folder = tmp_path_factory.mktemp(f"{name}_{'x'.join(map(str, layout))}")
            config = write_config(
                folder / "c.json",
                data,
                folder / "run",
                model=MODELS[name],
                parallel__tensor=layout[0],
                parallel__pipeline=layout[1],
                training={"steps": 2, "eval_interval": 2, "eval_samples": SAMPLES},
                checkpoint__interval=1,
            )
            results = train_run(config, math.prod(layout))
            assert [code for code, _ in results if code] == [], results
            known[name, layout] = folder / "run"
        return known[name, layout]

    return train


def _load(folder: Path) -> Any:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: value for key, value in info.items() if value and key != "error_msgs"}
    assert not wrong, wrong
    return model.eval()


def _hf_loss(model: Any, data: Path) -> float:
    """Mean loss of a model of transformers over the samples of an evaluation, in float64."""
    stream = build_split(_section(data), 500, "valid", SAMPLES)
    losses = []
    for tokens, (labels, _) in EvalLoader(stream, 1, 0, 1, SAMPLES):
        with torch.no_grad():
            logits = model(tokens).logits[0].double()
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0]))
    return float(torch.stack(losses).mean())


def _section(data: Path) -> Any:
    from megasdc.config.data import DataSection

    return DataSection.model_validate({"path": str(data), "sequence_length": 32})


def _our_logits(source: Path, tokens: torch.Tensor) -> torch.Tensor:
    from megasdc.model.pipeline import WholeModel
    from megasdc.parallel import groups

    weights = open_weights(source)
    with groups.single_process(), torch.no_grad():
        model = WholeModel(weights.model, vocab_size=weights.vocab_size, dtype=torch.float32)
        load_weights(weights, model.pipeline_parameters(), weights.model, vocab_size=weights.vocab_size)
        return model(tokens).transpose(0, 1)[..., : weights.vocab_size]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _same(one: Path, other: Path) -> bool:
    first, second = _tensors(one), _tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_export_computes_what_the_run_computed(
    tmp_path: Path, data: Path, trained: Trained, name: str, layout: tuple[int, int, int]
) -> None:
    """Logits, the run's own loss and greedy text agree, and a re-import gives every tensor back bit for bit."""
    from megasdc.train.inference import evaluate_weights, generate

    run = trained(name, layout)
    result = export_hf(run / "checkpoints", tmp_path / "out", max_shard_size="200KB")
    assert result.step == 2
    assert len(result.files) > 1
    theirs = _load(tmp_path / "out")
    assert theirs.config.vocab_size == 500

    tokens = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
    error = (_our_logits(run / "checkpoints", tokens) - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()

    (reported,) = [row["eval/loss"] for row in metrics_of(run) if "eval/loss" in row]
    assert _hf_loss(theirs, data) == pytest.approx(reported, rel=1e-5)
    found = evaluate_weights(run / "checkpoints")
    assert (found.loss, found.tokens) == (pytest.approx(reported, rel=1e-5), SAMPLES * 32)

    prompt = "def parse(self, text):\n    return "
    ours = generate(run / "checkpoints", prompt, max_tokens=20)
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(prompt, return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.prompt_tokens
    continued = theirs.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert continued.tolist() == ours.tokens

    import_hf(tmp_path / "out", tmp_path / "weights")
    export_hf(tmp_path / "weights", tmp_path / "again")
    assert _same(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "source", "layout"),
    [
        ("llama", (2, 1, 1), (1, 2, 1)),
        ("gpt", (1, 1, 1), (2, 2, 1)),
        pytest.param("gpt", (2, 2, 1), (1, 1, 2), marks=pytest.mark.full),
        pytest.param("llama", (2, 1, 1), (2, 2, 1), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_starts_from_imported_weights_at_another_layout(
    tmp_path: Path, data: Path, trained: Trained, name: str, source: tuple[int, int, int], layout: tuple[int, int, int]
) -> None:
    """A step with rate 0, the first of a warm-up, keeps every imported tensor; a resume needs the folder no more.

    Special ids and what came for ``generate`` come back too, as long as the folder is there.
    """
    from megasdc.train.inference import evaluate_weights

    export_hf(trained(name, source) / "checkpoints", tmp_path / "out")
    exported = json.loads((tmp_path / "out/config.json").read_text())
    end, generation = exported["eos_token_id"], '{"eos_token_id":  7, "temperature": 0.6, "do_sample": true}'
    special = {"bos_token_id": 5, "eos_token_id": [7, end], "pad_token_id": 3}
    (tmp_path / "out/config.json").write_text(json.dumps(exported | special))
    (tmp_path / "out/generation_config.json").write_text(generation)
    section = import_hf(tmp_path / "out", tmp_path / "weights").model
    config = write_config(
        tmp_path / "c.json",
        data,
        tmp_path / "run",
        model=section,
        parallel__tensor=layout[0],
        parallel__pipeline=layout[1],
        training={"steps": 2, "eval_interval": 1, "eval_samples": SAMPLES},
        checkpoint__interval=1,
        deepspeed__scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}},
    )
    assert {code for code, _ in train_run(config, math.prod(layout), "megasdc.training.stop_step=1")} == {0}
    before = metrics_of(trained(name, source))
    (reported,) = [row["eval/loss"] for row in before if "eval/loss" in row]
    now = [row["eval/loss"] for row in metrics_of(tmp_path / "run") if "eval/loss" in row]
    assert now == [pytest.approx(reported, rel=1e-5)]
    export_hf(tmp_path / "run/checkpoints", tmp_path / "again")
    assert _same(tmp_path / "out", tmp_path / "again")
    assert special.items() <= json.loads((tmp_path / "again/config.json").read_text()).items()
    assert (tmp_path / "again/generation_config.json").read_text() == generation
    found = evaluate_weights(tmp_path / "weights", config_path=config)
    assert found.loss == pytest.approx(reported, rel=1e-5)
    shutil.rmtree(tmp_path / "weights/tokenizer")
    export_hf(tmp_path / "run/checkpoints", tmp_path / "other")
    assert "without the tokenizer of the run" in (tmp_path / "other/README.md").read_text()
    shutil.rmtree(tmp_path / "weights")
    assert {code for code, _ in train_run(config, math.prod(layout), "megasdc.checkpoint.resume=must")} == {0}
    export_hf(tmp_path / "run/checkpoints", tmp_path / "later")
    ids = {"bos_token_id": end, "eos_token_id": end}
    assert json.loads((tmp_path / "later/generation_config.json").read_text()) == ids
    assert "where no imported weights are now" in (tmp_path / "later/README.md").read_text()


def test_training_starts_from_a_checkpoint_of_another_layout(tmp_path: Path, data: Path, trained: Trained) -> None:
    """A step with rate 0 on other data keeps every tensor of the newest checkpoint; steps and samples count anew."""
    source = trained("llama", (2, 1, 1)) / "checkpoints"
    model = {**MODELS["llama"], "initial_weights": str(source)}
    config = write_config(
        tmp_path / "c.json",
        prepare_other(tmp_path / "other", path=str(data / "tokenizer/tokenizer.model")),
        tmp_path / "run",
        model=model,
        parallel__pipeline=2,
        training={"steps": 2, "eval_interval": 2, "eval_samples": SAMPLES, "stop_step": 1},
        checkpoint__interval=1,
        deepspeed__scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}},
    )
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    started, saved = open_weights(tmp_path / "run/checkpoints"), open_weights(source)
    assert (started.step, saved.step) == (1, 2)
    for index in range(7):
        layers = started.layer(index), saved.layer(index)
        assert layers[0].keys() == layers[1].keys()
        assert all(torch.equal(layers[0][name], layers[1][name]) for name in layers[0]), index
    state = json.loads((tmp_path / "run/checkpoints/step_00000001/megasdc.json").read_text())
    assert (state["step"], state["samples"]) == (1, 4)


def prepare_other(folder: Path, **tokenizer: Any) -> Path:
    """Other text, with a given or a new tokenizer."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    raw = {
        "path": str(folder),
        "split": [8, 1, 1],
        "sources": [{"kind": "stdlib", "pattern": "json/*.py"}, {"kind": "stdlib", "pattern": "email/*.py"}],
        "tokenizer": tokenizer,
    }
    prepare(DataSection.model_validate(raw), progress=False)
    return folder


def test_training_refuses_checkpoints_that_do_not_fit(tmp_path: Path, data: Path, trained: Trained) -> None:
    """Another model, another tokenizer and a damaged file end the start with their code and both values."""
    source = shutil.copytree(trained("gpt", (1, 1, 1)) / "checkpoints/step_00000002", tmp_path / "step_00000002")

    def attempt(text: Path = data, **model: Any) -> tuple[int, str]:
        section = {**MODELS["gpt"], "initial_weights": str(source), **model}
        (result,) = train_run(write_config(tmp_path / "c.json", text, tmp_path / "run", model=section), 1)
        return result

    code, text = attempt(num_layers=2)
    assert (code, "num_layers: got 2; the weights in" in text and "megasdc.json" in text) == (70, True), text
    code, text = attempt(prepare_other(tmp_path / "other", vocab_size=500))
    assert (code, "were trained with a tokenizer of 500 entries" in text) == (70, True), text
    assert f"{data}/tokenizer" in text
    _flip(next(source.glob("layer_01*.pt")))
    code, text = attempt()
    assert (code, "no usable weights" in text and "layer_01" in text) == (72, True), text


def _agree() -> str:
    import torch.distributed as dist

    from megasdc.train.build_engine import _agree_on_source

    _agree_on_source("same", "step 3")
    with pytest.raises(CheckpointError) as caught:
        _agree_on_source("runs/a/checkpoints", f"step {3 + dist.get_rank()}")
    return str(caught.value)


def test_ranks_that_find_other_checkpoints_do_not_start() -> None:
    """Where a checkpoint appears while ranks look for the newest, all of them say which they found."""
    said = "megasdc.model.initial_weights: in runs/a/checkpoints ranks found step 3 and step 4; name one of them"
    assert run_distributed(_agree, 2) == [said] * 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, trained: Trained) -> Path:
    """An exported model in one file."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export_hf(trained("gpt", (1, 1, 1)) / "checkpoints", out)
    return out


def test_the_exported_tokenizer_gives_our_ids(exported: Path, data: Path) -> None:
    """AutoTokenizer of the export encodes real text, odd spaces, unknown characters and look-alikes as ours does."""
    import argparse
    import heapq
    import inspect

    import transformers

    ours = load_tokenizer("sentencepiece", data / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    texts = [
        inspect.getsource(argparse),
        inspect.getsource(heapq),
        "",
        " ",
        "\n\n\t  a",
        "  \u4f60\u597d \U0001f600 <eod>",
    ]
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode([text])[0]
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ours.end_of_document
    assert len(theirs) == ours.vocab_size


def test_answers_are_those_of_transformers(tmp_path: Path, exported: Path, trained: Trained) -> None:
    """Log-probabilities of choices agree within 1e-4 nats, and so do answers, accuracy and disagreement."""
    import transformers

    from megasdc.lab.studies.choices import evaluate_choices

    names = ["parse", "self.args", "lambda", " x", "\n        yield", "\u4f60"]
    prompts = [
        "def parse(self, text):\n    return ",
        "class Reader",
        "for name in names:\n    print(",
        "",
        "import os\n",
    ]
    lines = [
        {"prompt": prompt, "choices": names[: 2 + index % 5], "answer": index % 2}
        for index, prompt in enumerate(prompts * 4)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = trained("gpt", (1, 1, 1)) / "checkpoints"
    found = evaluate_choices(run, tmp_path / "q.jsonl", against=run / "step_00000001")
    theirs, words = _load(exported), transformers.AutoTokenizer.from_pretrained(exported)
    for line, sums, answer in zip(lines, found.model.log_probabilities, found.model.answers, strict=True):
        expected = [
            _log_probability(theirs, words, line["prompt"], choice, line["choices"]) for choice in line["choices"]
        ]
        assert sums == pytest.approx(expected, abs=1e-4)
        assert answer == max(range(len(expected)), key=lambda place: expected[place])
    right = [answer == line["answer"] for answer, line in zip(found.model.answers, lines, strict=True)]
    assert found.model.accuracy == sum(right) / 20 and (found.model.step, found.model.undecided) == (2, 0)
    assert found.against is not None and found.against.step == 1
    other = [one != two for one, two in zip(found.model.answers, found.against.answers, strict=True)]
    assert found.disagreement == sum(other) / 20
    same = evaluate_choices(run, tmp_path / "q.jsonl", against=trained("gpt", (2, 2, 1)) / "checkpoints")
    assert same.disagreement == 0.0, "another layout trains the same model"


def _log_probability(model: Any, words: Any, prompt: str, choice: str, choices: list[str]) -> float:
    """By a model of transformers, in float64: of the tokens after those that the prompt and all choices share."""
    texts = [words(prompt + one)["input_ids"] for one in choices]
    common = [len(set(column)) == 1 for column in zip(words(prompt)["input_ids"], *texts, strict=False)]
    given = (*common, False).index(False)
    ids = words(prompt + choice)["input_ids"]
    if given == 0:
        ids, given = [words.eos_token_id, *ids], 1
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    rows = logits.log_softmax(-1)
    return sum(float(rows[place - 1, ids[place]]) for place in range(given, len(ids)))


def test_types_and_files(tmp_path: Path, exported: Path, trained: Trained) -> None:
    """--dtype changes the type alone; a large limit gives one file, and transformers loads either."""
    source = trained("gpt", (1, 1, 1)) / "checkpoints"
    result = export_hf(source, tmp_path / "half", dtype="bf16", max_shard_size="1GB")
    assert (result.dtype, result.files) == ("bfloat16", ["model.safetensors"])
    half, full = _tensors(tmp_path / "half"), _tensors(exported)
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    _load(tmp_path / "half")


def test_sizes_and_their_division() -> None:
    """Sizes are read as documented, and no file but one with a single tensor is larger than the limit."""
    assert [parse_size(text) for text in ("2GB", "1.5 MiB", "100")] == [2 * 10**9, 3 * 2**19, 100]
    for text in ("", "GB", "-1GB", "0", "2XB"):
        with pytest.raises(ConfigError, match="max-shard-size"):
            parse_size(text)
    tensors = {name: torch.empty(size, device="meta") for name, size in (("a", 5), ("b", 5), ("c", 50), ("d", 1))}
    shards = divide(tensors, 40)
    assert [list(shard) for shard in shards.values()] == [["a", "b"], ["c"], ["d"]]
    assert next(iter(shards)) == "model-00001-of-00003.safetensors"


def test_generation_samples_and_cuts_the_context(exported: Path, trained: Trained, data: Path) -> None:
    """The same seed draws the same text, top-k 1 is greedy, and a long prompt is seen from its last tokens on."""
    from megasdc.train.inference import generate

    source = trained("gpt", (1, 1, 1)) / "checkpoints"
    draws = [generate(source, "def ", max_tokens=8, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    greedy = generate(source, "def ", max_tokens=8).tokens
    assert generate(source, "def ", max_tokens=8, temperature=2.0, top_k=1).tokens == greedy
    long = "import os, sys\n" * 30
    ids = load_tokenizer("sentencepiece", data / "tokenizer").encode([long])[0]
    assert len(ids) > 64
    with torch.no_grad():
        expected = int(_load(exported)(torch.tensor([ids[-64:]])).logits[0, -1].argmax())
    assert generate(source, long, max_tokens=1).tokens == [expected]


def test_generation_keeps_the_space_after_the_prompt(tmp_path: Path, exported: Path) -> None:
    """With a SentencePiece model that begins each text with a space, prompt and text together are what it decodes."""
    import sentencepiece

    from megasdc.train.inference import generate

    library = Path(json.__file__).parent.parent
    sentencepiece.SentencePieceTrainer.train(
        input=[str(library / f"{name}.py") for name in ("argparse", "ast", "inspect")],
        model_prefix=str(tmp_path / "dummy"),
        vocab_size=490,
        model_type="bpe",
        add_dummy_prefix=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "dummy.model"))
    assert model.decode(model.encode("a b")[1:]) == "b", "such a model drops the first space"
    model_folder = Path(shutil.copytree(exported, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    import_hf(model_folder, tmp_path / "weights")  # it brings no tokenizer, so that another one may be given
    spaces = 0
    for seed in range(12):
        options = {"max_tokens": 2, "temperature": 1e6, "seed": seed, "tokenizer": tmp_path / "dummy.model"}
        found = generate(tmp_path / "weights", "return a", **options)
        assert found.prompt + found.text == model.decode([*found.prompt_tokens, *found.tokens])
        spaces += found.text.startswith(" ")
    assert spaces > 0


def test_odd_arguments_of_a_generation(trained: Trained) -> None:
    """The smallest temperature is greedy; seeds past 64 bits and prompts that are no text are refused by name."""
    from megasdc.train.inference import generate

    source = trained("gpt", (1, 1, 1)) / "checkpoints"
    assert (
        generate(source, "def ", max_tokens=4, temperature=5e-324).tokens
        == generate(source, "def ", max_tokens=4).tokens
    )
    assert generate(source, "def ", max_tokens=1, temperature=1.0, seed=2**64 - 1).tokens
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match="--seed: out of range"):
            generate(source, "def ", seed=seed)
    with pytest.raises(ConfigError, match="--prompt: holds bytes that are not UTF-8, at character 2"):
        generate(source, os.fsdecode(b"ab\xff"))


def _copy(trained: Trained, tmp_path: Path) -> Path:
    shutil.copytree(trained("llama", (2, 1, 1)) / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoints(tmp_path: Path, trained: Trained) -> None:
    """A changed or missing shard is named with code 72; of several checkpoints the newest whole one is taken."""
    folder = _copy(trained, tmp_path)
    _flip(folder / "step_00000002" / "layer_03-model_01-model_states.pt")
    with pytest.raises(CheckpointError, match=r"layer_03-model_01-model_states.pt was changed"):
        export_hf(folder / "step_00000002", tmp_path / "out")
    assert export_hf(folder, tmp_path / "out").step == 1
    (folder / "step_00000001" / "layer_02-model_00-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)layer_03-model_01.*layer_02-model_00-model_states.pt is missing"):
        export_hf(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(CheckpointError, match="is not a folder"):
        export_hf(tmp_path / "nowhere", tmp_path / "other")


def test_what_is_there_is_not_overwritten(tmp_path: Path, trained: Trained) -> None:
    """An existing OUT is refused; --force replaces an earlier export and nothing else; a bad place is named."""
    source = trained("gpt", (1, 1, 1)) / "checkpoints"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"OUT: .*mine"):
            export_hf(source, tmp_path / "mine", force=force)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="was not made by this command"):
        export_hf(source, tmp_path / "out", force=True)
    (tmp_path / "out" / "config.json").unlink()
    export_hf(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is there already.*--force"):
        export_hf(source, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    export_hf(source, tmp_path / "out", force=True)
    with pytest.raises(ConfigError, match="which is to be read"):
        export_hf(source, source.parent, force=True)
    assert source.is_dir()
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(StorageError, match="cannot be written"):
        export_hf(source, tmp_path / "mine" / "thesis.tex" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_missing_tokenizer(tmp_path: Path, trained: Trained, data: Path) -> None:
    """Without the prepared data the tokenizer is asked for; another one than the model's is refused."""
    from megasdc.train.inference import evaluate_weights

    folder = _copy(trained, tmp_path)
    data.rename(data.with_name("away"))
    try:
        with pytest.raises(DataError, match=r"tokenizer.*is not there; give it with --tokenizer"):
            export_hf(folder, tmp_path / "out")
        with pytest.raises(DataError, match=r"--tokenizer: .*nothere is not there; give a folder"):
            export_hf(folder, tmp_path / "out", tokenizer=tmp_path / "nothere")
        with pytest.raises(DataError, match=r"data .* do not exist; .* start in the folder that the run was started"):
            evaluate_weights(folder)
        result = export_hf(folder, tmp_path / "out", tokenizer=data.with_name("away") / "tokenizer")
        assert result.tokenizer == "auto"
        texts = [path.read_text(encoding="utf-8")[::-1] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
        train_sentencepiece(texts, tmp_path / "same_size.model", 500)
        with pytest.raises(DataError, match="it is another one; give the right one"):
            export_hf(folder, tmp_path / "refused", tokenizer=tmp_path / "same_size.model")
        assert not (tmp_path / "refused").exists()
    finally:
        data.with_name("away").rename(data)


def test_the_tokenizer_of_an_import_comes_out_as_it_went_in(tmp_path: Path, exported: Path, data: Path) -> None:
    """Exported again, each of its files has the same bytes and AutoTokenizer gives our ids; a changed one is named."""
    import transformers

    model = Path(shutil.copytree(exported, tmp_path / "model"))
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "of_the_author": "kept"}))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    import_hf(model, tmp_path / "weights")
    assert export_hf(tmp_path / "weights", tmp_path / "out").note is None
    names = ["tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes(), name
    text = "def f(x):\n    return  x  # <eod>\n"
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
    assert ids == load_tokenizer("sentencepiece", data / "tokenizer").encode([text])[0]
    _flip(tmp_path / "weights" / "tokenizer" / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer/tokenizer.model was changed"):
        export_hf(tmp_path / "weights", tmp_path / "again")


def test_a_tokenizer_given_for_an_import_must_give_its_ids(tmp_path: Path, exported: Path, data: Path) -> None:
    """The model file that its tokenizer was made from is taken, one of the same size with other ids is refused."""
    import_hf(exported, tmp_path / "weights")
    result = export_hf(tmp_path / "weights", tmp_path / "out", tokenizer=data / "tokenizer" / "tokenizer.model")
    assert result.tokenizer == "auto"
    texts = [path.read_text(encoding="utf-8")[::-1] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    train_sentencepiece(texts, tmp_path / "same_size.model", 500)
    with pytest.raises(DataError, match=r"same_size.model gives other ids than .*weights/tokenizer"):
        export_hf(tmp_path / "weights", tmp_path / "refused", tokenizer=tmp_path / "same_size.model")
    assert not (tmp_path / "refused").exists()


def test_eval_on_data_of_another_tokenizer_is_refused(tmp_path: Path, trained: Trained, data: Path) -> None:
    """A loss over ids that mean something else would be a number without sense: exit code 71."""
    from megasdc.train.inference import evaluate_weights

    other = shutil.copytree(data, tmp_path / "other")
    manifest = DataManifest.load(other)
    tokenizer = manifest.tokenizer.model_copy(update={"checksum": "0" * 16})
    manifest.model_copy(update={"tokenizer": tokenizer}).save(other)
    folder = str(trained("gpt", (1, 1, 1)) / "checkpoints")
    with pytest.raises(DataError, match="prepared with a tokenizer of checksum 0000"):
        evaluate_weights(folder, overrides=[f"megasdc.data.path={other}"])


def test_eval_tells_what_is_not_checked(tmp_path: Path, trained: Trained, data: Path) -> None:
    """Data of the version before, which kept no checksums of blocks: the result says so, with the remedy."""
    from megasdc.train.inference import evaluate_weights

    earlier = Path(shutil.copytree(data, tmp_path / "earlier", ignore=shutil.ignore_patterns("*.checksums")))
    content = json.loads((earlier / "manifest.json").read_text())
    files = {name: one for name, one in content.pop("files").items() if not name.endswith(".checksums")}
    kept = {name: value for name, value in content.items() if name not in ("checksum", "block_bytes")}
    (earlier / "manifest.json").write_text(json.dumps({**kept, "files": files, "format_version": 1}))
    folder = str(trained("gpt", (1, 1, 1)) / "checkpoints")
    now, before = (evaluate_weights(folder, overrides=[f"megasdc.data.path={path}"]) for path in (data, earlier))
    assert before.loss == now.loss and not now.notes
    (note,) = before.notes
    assert f"megasdc verify-data --add-checksums {earlier}" in note


def test_an_evaluation_uses_no_sample_twice(trained: Trained, data: Path) -> None:
    """More samples than a split holds: all once, and the result says so; overrides without effect are refused."""
    from megasdc.train.inference import evaluate_weights

    folder = str(trained("gpt", (1, 1, 1)) / "checkpoints")
    alone = build_split(_section(data), 500, "test", 1).num_distinct
    whole = evaluate_weights(folder, split="test", samples=alone)
    assert (whole.samples, whole.notes) == (alone, [])
    more = evaluate_weights(folder, split="test", samples=3 * alone)
    assert (more.samples, more.tokens, more.loss) == (alone, whole.tokens, whole.loss)
    assert f"{3 * alone} samples were asked for; test holds {alone}" in more.render()
    for unused in ("megasdc.model.num_layers=1", "megasdc.training.steps=3", "optimizer.params.lr=1"):
        with pytest.raises(ConfigError, match=rf"{unused.partition('=')[0]}: has no effect here"):
            evaluate_weights(folder, overrides=[unused])


def test_rows_beyond_the_tokenizer_are_in_the_softmax(tmp_path: Path, exported: Path, data: Path) -> None:
    """Of a model with more rows than its tokenizer has entries, the loss is that of transformers, with a note."""
    from safetensors.torch import load_file, save_file

    from megasdc.train.inference import evaluate_weights

    model = Path(shutil.copytree(exported, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    rows = torch.nn.functional.pad(tensors["transformer.wte.weight"], (0, 0, 0, 12))
    save_file({**tensors, "transformer.wte.weight": rows}, model / "model.safetensors", {"format": "pt"})
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "vocab_size": 512}))
    import_hf(model, tmp_path / "weights")
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", model=MODELS["gpt"])
    found = evaluate_weights(tmp_path / "weights", config_path=config, samples=SAMPLES)
    assert found.loss == pytest.approx(_hf_loss(_load(model), data), rel=1e-5)
    assert found.loss > evaluate_weights_of(exported, tmp_path, config) + 1e-3
    assert "over all 512 rows of the embedding, as in transformers, of which the tokenizer has 500" in found.render()


def evaluate_weights_of(exported: Path, tmp_path: Path, config: Path) -> float:
    """Loss of an exported model as it is."""
    from megasdc.train.inference import evaluate_weights

    import_hf(exported, tmp_path / "plain")
    plain = evaluate_weights(tmp_path / "plain", config_path=config, samples=SAMPLES)
    assert plain.notes == []
    return plain.loss


def test_models_that_cannot_be_imported(tmp_path: Path, exported: Path) -> None:
    """Pickles, further tensors, damage and unknown architectures are refused by name, and OUT is not made."""
    from safetensors.torch import load_file, save_file

    def attempt(change: Callable[[Path], Any]) -> Any:
        copy = tmp_path / "model"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(exported, copy)
        change(copy)
        return import_hf(copy, tmp_path / "out")

    def edit(**changes: Any) -> Callable[[Path], Any]:
        def change(folder: Path) -> None:
            content = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**content, **changes}))

        return change

    def add(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "transformer.h.0.attn.q_norm.weight": torch.ones(16)}, folder / "model.safetensors")

    def truncate(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:-8])

    with pytest.raises(ConfigError, match=r"model_type: got 'mamba'.*supported are"):
        attempt(edit(model_type="mamba"))
    with pytest.raises(ConfigError, match=r"q_norm.weight: is not a tensor of a supported architecture"):
        attempt(add)
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a whole safetensors file"):
        attempt(truncate)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin are pickles, which are not opened"):
        attempt(lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"))
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        attempt(lambda folder: (folder / "config.json").unlink())
    with pytest.raises(CheckpointError, match=r"MODEL: .*/nothing is not there"):
        import_hf(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    attempt(lambda folder: None)
    with pytest.raises(ConfigError, match="is there already"):
        import_hf(exported, tmp_path / "out")


def test_training_refuses_weights_that_do_not_fit(tmp_path: Path, data: Path, exported: Path) -> None:
    """Other sizes, another vocabulary and changed files end all ranks with their code and both values."""
    section = import_hf(exported, tmp_path / "weights").model

    def attempt(**changes: Any) -> tuple[int, str]:
        model = {**section, **changes.pop("model", {})}
        config = write_config(tmp_path / "c.json", changes.pop("data", data), tmp_path / "run", model=model)
        (result,) = train_run(config, 1)
        return result

    code, text = attempt(model={"num_layers": 2, "norm_epsilon": 1e-6})
    assert code == 70
    assert "megasdc.model.num_layers: got 2; the weights in" in text
    assert "megasdc.model.norm_epsilon: got 1e-06" in text

    content = json.loads((tmp_path / "weights/weights.json").read_text())
    for key in ("vocab_size", "tokenizer_vocab_size"):
        content[key] = 490
    shutil.copytree(tmp_path / "weights", tmp_path / "other")
    (tmp_path / "other/weights.json").write_text(json.dumps(content))
    code, text = attempt(model={"initial_weights": str(tmp_path / "other")})
    assert (code, "have 490 vocabulary entries" in text and "has 500" in text) == (70, True), text
    shutil.copytree(tmp_path / "weights", tmp_path / "another")
    _flip(tmp_path / "another/tokenizer/tokenizer.model")
    code, text = attempt(model={"initial_weights": str(tmp_path / "another")})
    assert (code, "but it is another" in text) == (70, True), text

    _flip(tmp_path / "weights/layer_03.safetensors")
    code, text = attempt()
    assert (code, "layer_03.safetensors was changed" in text) == (72, True), text
    code, text = attempt(model={"initial_weights": str(tmp_path / "gone")})
    assert (code, "is not a folder made by `megasdc import-hf`" in text) == (72, True), text


def test_the_commands(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command prints one JSON object with --json, text without, and ends with the documented code."""
    run = str(trained("gpt", (1, 1, 1)) / "checkpoints")
    out, weights = str(tmp_path / "out"), str(tmp_path / "weights")

    def call(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["megasdc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        codes.append(ended.value.code or 0)
        return capsys.readouterr().out

    codes: list[Any] = []
    assert json.loads(call("export-hf", run, out, "--json"))["architecture"] == "GPT2LMHeadModel"
    assert json.loads(call("import-hf", out, weights))["initial_weights"] == weights
    assert json.loads(call("eval", run, "--split", "test", "--samples", "2", "--json"))["tokens"] == 64
    assert call("generate", weights, "--prompt", "def ", "--max-tokens", "4").startswith("def ")
    assert codes == [0, 0, 0, 0]
    call("export-hf", run, out)
    call("eval", weights)
    call("export-hf", str(tmp_path), str(tmp_path / "x"))
    assert codes[4:] == [70, 70, 72]
    (tmp_path / "q.jsonl").write_text('{"prompt": "def ", "choices": ["parse", "0"], "answer": 0}\n')
    options = ("--choices", str(tmp_path / "q.jsonl"), "--against", weights)
    found = json.loads(call("eval", run, *options, "--json"))
    assert (found["questions"], found["model"]["step"], found["against"]["step"]) == (1, 2, None)
    assert found["model"]["answers"] == found["against"]["answers"] and found["disagreement"] == 0
    assert "1 question\n" in (text := call("eval", run, *options)) and "answered differently: 0.0 %" in text
    (tmp_path / "q.jsonl").write_text("{}\n")
    call("eval", run, *options)
    assert codes[7:] == [0, 0, 71]
