"""Beginning-of-sequence tokens: put into data if asked for, kept by imports, and told by exports as they are."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from small_models import TEXTS, edit, made, tokenizer

from megasdc.common.errors import ConfigError, DataError
from megasdc.config.data import DataSection
from megasdc.config.model import ModelSection
from megasdc.data.dataset import build_split
from megasdc.data.prepare import prepare
from megasdc.data.shards import shard_path
from megasdc.data.tokenizer import load_tokenizer
from megasdc.interchange.export_hf import (
    _special_ids,
    _write_configs,
    beginning_of_document,
    describe_encoding,
    export_hf,
    export_tokenizer,
)
from megasdc.interchange.import_hf import import_hf


def section(tmp_path, **changes):
    """Data of some small documents."""
    (tmp_path / "texts").mkdir(exist_ok=True)
    for index, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{index:02d}.txt").write_text(text)
    raw = {
        "path": str(tmp_path / "data"),
        "split": [8, 2, 2],
        "sequence_length": 16,
        "sources": [{"kind": "files", "path": str(tmp_path / "texts")}],
        "tokenizer": {"kind": "huggingface", "path": str(tmp_path / "tokenizer")},
        **changes,
    }
    return DataSection.model_validate(raw)


def documents(folder):
    """All documents of all splits."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    splits = (IndexedDataset(str(folder / name)) for name in ("train", "valid", "test"))
    return [np.array(one).tolist() for split in splits for one in split]


def test_data_begin_with_the_tokenizers_own_token(tmp_path):
    """Each document is the same as without, behind one id; counts of text do not change."""
    tokenizer(tmp_path / "tokenizer")
    plain = prepare(section(tmp_path), progress=False)
    begun = prepare(section(tmp_path, bos=True), tmp_path / "begun", progress=False)
    before, after = documents(tmp_path / "data"), documents(tmp_path / "begun")
    assert after == [[1, *document] for document in before] and all(document[-1] == 2 for document in before)
    assert "bos" not in plain.settings and begun.settings["bos"] is True
    assert begun.splits["train"].num_bytes == plain.splits["train"].num_bytes


def test_a_shard_with_another_beginning_is_another(tmp_path):
    """One that a killed run left is not taken for it; without a beginning its name is that of older versions."""
    names = {shard_path(tmp_path, 0, ["a"], "x", beginning) for beginning in (None, 0, 1)}
    assert len(names) == 3
    assert shard_path(tmp_path, 0, ["a"], "x").name == "00000000-9b990fce29aba2548e0d25d570308d00.npz"


def test_a_tokenizer_without_one_and_other_data_are_refused(tmp_path):
    """The field, its value and the remedy are named, also where data and configuration disagree."""
    tokenizer(tmp_path / "tokenizer", bos_token=None)
    with pytest.raises(DataError, match=r"data.bos is true, but the tokenizer has no beginning-of-sequence token"):
        prepare(section(tmp_path, bos=True), progress=False)
    prepare(section(tmp_path), progress=False)
    with pytest.raises(DataError, match=r"data.bos is true, but .*/data was prepared with null"):
        build_split(section(tmp_path, bos=True), 300, "train", 1)
    build_split(section(tmp_path), 300, "train", 1)


@pytest.mark.parametrize(
    ("template", "bos", "call"),
    [
        (True, None, "tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids"),
        (True, True, "tokenizer(text, split_special_tokens=True).input_ids"),
        (False, None, "tokenizer(text, split_special_tokens=True).input_ids"),
        (False, True, "[1] + tokenizer(text, split_special_tokens=True).input_ids"),
    ],
)
def test_the_readme_says_the_call_that_gives_the_ids(tmp_path, template, bos, call):
    """What an export says, carried out on a text of its own, gives the ids that the data have."""
    source = tokenizer(tmp_path / "tokenizer", template)
    prepare(section(tmp_path, bos=bos), progress=False)
    words = load_tokenizer("huggingface", tmp_path / "data" / "tokenizer")
    config = {"megasdc": {"data": {"bos": bos} if bos else {}}}
    weights = SimpleNamespace(config=config, model=ModelSection(), vocab_size=300)
    beginning = beginning_of_document(weights, words)
    assert beginning == (1 if bos else None)
    (tmp_path / "out").mkdir()
    assert export_tokenizer(words, tmp_path / "out", beginning) is None
    found = describe_encoding(words, tmp_path / "out", beginning, "the data of training")
    assert (found.call, found.adds) == (call, template != bool(bos))
    _write_configs(tmp_path / "out", weights, _special_ids(weights, beginning, words), 2, "float32")
    for file in ("config.json", "generation_config.json"):  # without one, the end of the document before begins one
        written = json.loads((tmp_path / "out" / file).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (1 if bos else 2, 2)
    assert f"The data of training have the ids of `{call}`" in found.text
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = [eval(call, {"tokenizer": loaded, "text": text}) for text in TEXTS]
    assert sorted([*one, 2] for one in ids) == sorted(documents(tmp_path / "data"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()


def test_a_sentencepiece_model_with_a_beginning(tmp_path):
    """AutoTokenizer of an export puts the same id before a text, without options."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    words = load_tokenizer("sentencepiece", tmp_path / "tokenizer.model")
    assert (words.beginning_of_document, words.end_of_document) == (1, 2)
    (tmp_path / "out").mkdir()
    assert export_tokenizer(words, tmp_path / "out", 1) is None
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [loaded(text).input_ids for text in TEXTS] == [[1, *ids] for ids in words.encode(TEXTS)]
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert describe_encoding(words, tmp_path / "out", 1, "the data").call == "tokenizer(text).input_ids"


IDS = {"bos_token_id": 40, "eos_token_id": [41, 42], "pad_token_id": None}
GENERATION = '{"bos_token_id":40,  "eos_token_id": [41, 42], "temperature": 0.6, "do_sample": true}'


@pytest.mark.parametrize("generation", [True, False])
def test_special_ids_come_back_from_an_import(tmp_path, generation):
    """Those in config.json, in every form, and generation_config.json byte for byte, or none where there was none."""
    folder = made(tmp_path / "model", vocab_size=300)
    edit(folder, **IDS)
    (folder / "generation_config.json").unlink()
    if generation:
        (folder / "generation_config.json").write_text(GENERATION)
    tokenizer(folder, template=generation)
    note = import_hf(folder, tmp_path / "weights").note or ""
    assert (
        "beginning-of-sequence token, id 1, before a text: prepare data and train with data.bos" in note
    ) == generation
    found = export_hf(tmp_path / "weights", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: config[key] for key in IDS} == IDS
    out = tmp_path / "out/generation_config.json"
    assert out.read_text() == GENERATION if generation else not out.exists()
    text = (tmp_path / "out/README.md").read_text()
    assert "Ids of special tokens are those that were imported." in text
    call = f"tokenizer(text, {'add_special_tokens=False, ' if generation else ''}split_special_tokens=True).input_ids"
    assert f"Data that `megasdc prepare-data` makes with it have the ids of `{call}`" in text
    assert found.tokenizer == "auto" and (call in found.render()) == generation
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()

    content = json.loads((tmp_path / "weights/weights.json").read_text())  # as an older version has written it
    (tmp_path / "weights/weights.json").write_text(json.dumps({k: v for k, v in content.items() if k != "token_ids"}))
    export_hf(tmp_path / "weights", tmp_path / "again")
    again = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert again == {"bos_token_id": 2, "eos_token_id": 2}


@pytest.mark.parametrize("value", ["<s>", True, 2.0, [2, "<s>"], [[2]], {"id": 2}])
def test_special_ids_that_are_none_are_refused(tmp_path, value):
    """As other values of a wrong type are."""
    folder = made(tmp_path / "model")
    edit(folder, bos_token_id=value)
    with pytest.raises(ConfigError, match=rf"bos_token_id: got {re.escape(repr(value))}; needed is an id, a list of "):
        import_hf(folder, tmp_path / "weights")


def test_special_ids_outside_the_vocabulary_are_told_and_kept(tmp_path):
    """Of a list the first that is an id ends a document, where no tokenizer says what does."""
    folder = made(tmp_path / "model")
    ids = {"bos_token_id": 50, "eos_token_id": [128001, 49, 3], "pad_token_id": -1}
    edit(folder, **ids)
    note = import_hf(folder, tmp_path / "weights").note
    for key, value in ids.items():
        assert f"{key} {value} in config.json is outside the vocabulary of 50: it is kept as it is" in note
    content = json.loads((tmp_path / "weights/weights.json").read_text())
    assert (content["token_ids"], content["end_of_document"]) == (ids, 49)


@pytest.mark.parametrize("named", [True, False])
def test_a_class_that_only_the_models_configuration_tells_is_kept(tmp_path, named):
    """GPT-2's tokenizer beside a GPT-2 model loads without it, and beside a model of another kind; files are copied."""
    folder = tokenizer(tmp_path / "tokenizer", template=False, bos_token=None, eos_token="</s>")
    content = json.loads((folder / "tokenizer_config.json").read_text())
    if not named:
        del content["tokenizer_class"]
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "model.safetensors").write_bytes(b"weights of a model")
    words = load_tokenizer("huggingface", folder)
    words.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    again = load_tokenizer("huggingface", tmp_path / "saved")
    assert again.encode(TEXTS) == words.encode(TEXTS) and again.end_of_document == words.end_of_document
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    saved = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    if named:
        assert (tmp_path / "saved/tokenizer_config.json").read_bytes() == (
            folder / "tokenizer_config.json"
        ).read_bytes()
    else:
        assert saved == {**content, "tokenizer_class": "GPT2Tokenizer"}


def test_a_tokenizer_of_the_hub_is_copied(tmp_path, monkeypatch):
    """From the hub's cache, byte for byte, without other files of the model."""
    cache = tmp_path / "cache" / "models--some--words"
    snapshot = tokenizer(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (snapshot / "README.md").write_text("of a model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = load_tokenizer("huggingface", "some/words")
    words.save(tmp_path / "saved")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert copied == {name: (snapshot / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
