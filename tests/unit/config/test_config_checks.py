"""Contradictions inside a file, and between a file and the number of ranks, are found before anything starts."""

import ast
import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasdc import config
from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, find_warnings, layout_problems, resolve_batch
from megasdc.config.load import WholeFile, load_config, parse_config
from megasdc.config.model import PRESETS, ModelSection, ffn_width, head_width
from megasdc.config.schema import REMOVED, locate_key

BASE = {"megasdc": {"data": {"path": "x"}, "protect": "off", "training": {"steps": 100}, "logging": {"run_dir": "r"}}}
IDS = {"kind": "megatron", "path": "a"}
GIVEN = {"tokenizer": {"path": "t"}}


def build(deepspeed=None, **sections):
    raw = {**copy.deepcopy(BASE), **(deepspeed or {})}
    for name, values in sections.items():
        raw["megasdc"][name] = {**raw["megasdc"].get(name, {}), **values}
    return parse_config(raw)


@pytest.mark.parametrize(("stages", "accepted"), [(3, True), (4, True), (5, False)])
def test_every_stage_needs_a_layer(stages, accepted):
    """As many stages as layers are accepted, more are not."""
    sections = {"model": {"num_layers": 4}, "parallel": {"pipeline": stages, "partition": "parameters"}}
    if accepted:
        build(**sections)
    else:
        assert "every stage needs a layer: at most 4" in problem(**sections)


def problem(deepspeed=None, **sections):
    with pytest.raises(ConfigError) as caught:
        build(deepspeed, **sections)
    (text,) = caught.value.problems
    return text


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"model": {"hidden_size": 130}}, ["model.hidden_size: got 130", "num_attention_heads 4"]),
        ({"model": {"num_attention_heads": 4, "num_query_groups": 3}}, ["got 4", "num_query_groups 3"]),
        ({"model": {"position_embedding": "rope", "kv_channels": 33}}, ["head is 33", "even"]),
        ({"model": {"vocab_multiple": 102}, "parallel": {"tensor": 4}}, ["vocab_multiple: got 102", "tensor 4"]),
        ({"model": {"num_attention_heads": 8, "num_query_groups": 2}, "parallel": {"tensor": 4}}, ["groups: got 2"]),
        ({"model": {"ffn_hidden_size": 126}, "parallel": {"tensor": 4}}, ["ffn_hidden_size: got 126", "tensor 4"]),
        ({"parallel": {"sequence_parallel": True}}, ["tensor 1", "set tensor > 1"]),
        (
            {"parallel": {"sequence_parallel": True, "tensor": 2}, "data": {"sequence_length": 77}},
            ["sequence_length: got 77", "tensor 2"],
        ),
        ({"data": {"sequence_length": 4096}}, ["got 4096", "max_positions 2048"]),
        ({"golden": {"sequence_lengths": [8, 4096]}}, ["golden.sequence_lengths.1: got 4096", "max_positions 2048"]),
        ({"golden": {"sequence_lengths": []}}, ["golden.sequence_lengths: got []", "at least 1"]),
        (
            {"parallel": {"sequence_parallel": True, "tensor": 2}, "golden": {"sequence_lengths": [77]}},
            ["golden.sequence_lengths.0: got 77", "tensor 2"],
        ),
        ({"parallel": {"pipeline": 3}}, ["3 stages for 2 layers", "at most 2"]),
        ({"parallel": {"pipeline": 2}, "model": {"num_layers": 3}}, ['"uniform"', "num_layers 3", "pipeline 2"]),
        ({"parallel": {"pipeline": 2, "partition": [1, 2]}}, ["2 stages with 3 layers", "with 2 layers"]),
        ({"parallel": {"pipeline": 1, "partition": [1, 1]}}, ["2 stages with 2 layers", "1 stages"]),
        ({"data": {"split": [0, 1, 1]}}, ["share of training"]),
        ({"data": {"path": " "}}, ["folder of prepared data"]),
        ({"data": {"sources": [{"kind": "stdlib", "path": "x"}]}}, ["sources.0.path", "takes no path"]),
        ({"data": {"sources": [{"kind": "files"}]}}, ["sources.0.path: missing"]),
        ({"data": {"sources": [{"kind": "files", "path": "a", "streaming": True}]}}, ["streaming", '"hub"']),
        ({"data": {"sources": [{"kind": "files", "path": "a", "pattern": "*"}]}}, ["sources.0.pattern", '"stdlib"']),
        ({"data": {"sources": [{"kind": "megatron"}], **GIVEN}}, ["sources.0.path: missing", "the prefix of a .bin"]),
        ({"data": {"sources": [IDS]}}, ["tokenizer.path: missing", 'data.sources.0, of kind "megatron"']),
        ({"data": {"sources": [{**IDS, "text_unit": "line"}], **GIVEN}}, ['0.text_unit: got "line"', "no text"]),
        ({"data": {"sources": [IDS], "max_unreadable": 3, **GIVEN}}, ["data.max_unreadable: has no effect"]),
        (
            {"data": {"sources": [IDS], "tokenizer": {"path": "t", "accept_unknown": True}}},
            ["data.tokenizer.accept_unknown: has no effect"],
        ),
        ({"data": {"sources": [{"pattern": "../*.py"}]}}, ['sources.0.pattern: got "../*.py"', "inside the library"]),
        ({"data": {"sources": [{"pattern": "a**/*.py"}]}}, ["sources.0.pattern", "whole folders"]),
        ({"data": {"blend": [{"path": "a", "weight": 1.0}]}}, ['data.path: got "x"', "not in megasdc.data.blend (a)"]),
        ({"data": {"blend": [{"path": "x", "weight": 1}, {"path": "", "weight": 1}]}}, ['blend.1.path: got ""']),
        (
            {"data": {"blend": [{"path": "x", "weight": 1}, {"path": "./x/", "weight": 2}]}},
            ['blend.1.path: got "./x/"', "data.blend.0.path names already", "sum of the weights"],
        ),
        ({"data": {"blend": [{"path": "x", "weight": 0}]}}, ["blend.0.weight: got 0", "> 0"]),
        ({"data": {"blend": [{"path": "x", "weight": -1.5}]}}, ["blend.0.weight: got -1.5", "> 0"]),
        ({"data": {"blend": [{"path": "x", "weight": float("inf")}]}}, ["blend.0.weight: got Infinity"]),
        ({"data": {"blend": [{"path": "x", "weight": 1e308}, {"path": "y", "weight": 1e308}]}}, ["is infinite"]),
        ({"data": {"blend": [{"path": "x"}]}}, ["blend.0.weight", "needed"]),
        ({"data": {"tokenizer": {"kind": "huggingface"}}}, ["tokenizer.path: missing"]),
        ({"training": {"eval_interval": 5}, "data": {"split": [1, 0, 0]}}, ["eval_interval: got 5", "[1, 0, 0]"]),
        (
            {"determinism": {"fill_uninitialized_memory": True}},
            ["fill_uninitialized_memory: got true", "enabled false"],
        ),
        (
            {"determinism": {"enabled": True}, "parallel": {"threads": 0}},
            ["threads: got 0", "determinism.enabled true"],
        ),
        (
            {"determinism": {"enabled": True}, "model": {"megatron": {"deterministic_mode": False}}},
            ["deterministic_mode: got false", "needs true"],
        ),
        (
            {"training": {"garbage_collection_interval": 5}},
            ["garbage_collection_interval: got 5", 'garbage_collection "python"', 'garbage_collection to "managed"'],
        ),
        ({"checkpoint": {"memory": {"partners": True}}}, ["memory.partners: got true", "memory.interval 0"]),
        ({"checkpoint": {"memory": {"linger_s": 5.0}}}, ["memory.linger_s: got 5.0", "memory.interval 0"]),
        ({"checkpoint": {"writing": "sync", "when_late": "skip"}}, ['when_late: got "skip"', 'writing "sync"']),
        (
            {"checkpoint": {"archive": {"every": 2}}},
            ["archive.every: got 2", "archive.address null"],
        ),
        ({"logging": {"run_dir": ""}}, ["run_dir"]),
        ({"trace": {"algorithm": "crc32"}}, ['trace.algorithm: got "crc32"', "xxh3_64.v1", "mixed_sum_64.v1"]),
        ({"trace": {"layers": [2, 6]}}, ["trace.layers: got 6", "num_layers 2", "2 to 3"]),
        ({"model": {"megatron": {"hidden_size": 4}}}, ["megatron.hidden_size: got 4", "megasdc.model.hidden_size"]),
        ({"model": {"megatron": {"qk_layernrm": True}}}, ["no such field", "did you mean qk_layernorm?"]),
        ({"model": {"megatron": {"window_size": [8, 0]}}}, ["megatron.window_size: got", "no effect", "qk_layernorm"]),
        ({"model": {"megatron": {"layernorm_zero_centered_gamma": True}}}, ["zero_centered_gamma: got", "no effect"]),
        ({"model": {"megatron": {"embedding_init_method_std": 0.1}}}, ["embedding_init_method_std", "no effect"]),
        ({"model": {"megatron": {"fp8": "hybrid"}}}, ["megatron.fp8: got 'hybrid'", "it is not supported"]),
        ({"model": {"megatron": {"glu_linear_offset": 1.0}}}, ["only with megasdc.model.gated_mlp true"]),
        ({"model": {"megatron": {"no_rope_freq": 2}}}, ['only with megasdc.model.position_embedding "rope"']),
    ],
)
def test_contradictions_of_our_sections(sections, parts):
    """Each contradiction gives exactly one problem, with both numbers."""
    text = problem(**sections)
    assert all(part in text for part in parts), text


def test_blend_problems_come_together():
    """A wrong weight, a folder named twice and a path outside the blend are reported at once; an empty list is none."""
    parts = [{"path": "a", "weight": 1}, {"path": "a", "weight": 2}, {"path": "b", "weight": 0.0}]
    with pytest.raises(ConfigError) as caught:
        build(data={"blend": parts[:2], "split": [0, 1, 1]})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match=r"blend\.2\.weight"):
        build(data={"blend": parts})
    assert build(data={"blend": []}).megasdc.data.folders == ["x"]
    blend = [{"path": "y", "weight": 0.25}, {"path": "x", "weight": 3}]
    assert build(data={"blend": blend}).megasdc.data.folders == ["y", "x"]


@pytest.mark.parametrize(
    ("deepspeed", "parts"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["switch one of them off"]),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, ["remove bfloat16"]),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}, ['got "fp16"', '"fp32" or "bf16"']),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ["model in fp32", 'allowed: "fp32".']),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, ['got "fp32"', 'allowed: "fp16".']),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ["grad_accum_dtype", 'device "cpu"', 'set grad_accum_dtype "bf16"'],
        ),
        ({"checkpoint": {"load_universal": True}}, ["checkpoint.load_universal: got true", "allowed: false"]),
        ({"zero_optimization": {"elastic_checkpoint": True}}, ["elastic_checkpoint: got true", "allowed: false"]),
        ({"checkpoint": {"writer": {"type": "x"}}}, ["checkpoint.writer: got", "Remove the key"]),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16_master_weights_and_grads"]),
        ({"optimizer": {"params": {"bias_correction": True}}}, ["bias_correction"]),
        ({"optimizer": {"params": {"foreach": True, "fused": True}}}, ["foreach"]),
        ({"optimizer": {"params": {"torch_adam": False, "fused": True}}}, ["fused"]),
        ({"optimizer": {"params": {"max_grad_norm": 1}}}, ["not supported: set gradient_clipping"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}, ["WarmupLR does not take it"]),
        ({"checkpoint": {"use_node_local_storage": True}}, ['storage is "shared"']),
        ({"pipeline": {"stages": 2}}, ["set megasdc.parallel.pipeline"]),
    ],
)
def test_contradictions_of_deepspeeds_part(deepspeed, parts):
    """Each contradiction gives exactly one problem."""
    text = problem(deepspeed)
    assert all(part in text for part in parts), text


def test_megatron_fields_pass_through():
    """A field of TransformerConfig that has no name of its own here is accepted."""
    assert build(model={"megatron": {"qk_layernorm": True}}).megasdc.model.megatron == {"qk_layernorm": True}


def test_transformer_engine_says_how_to_get_it(monkeypatch):
    """Asking for Transformer Engine without it names the package and the other choice."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = problem(model={"backend": "transformer_engine"})
    assert "pip install" in text and '"torch"' in text


def test_every_useless_field_is_reported():
    """All fields without effect are reported at once."""
    with pytest.raises(ConfigError) as caught:
        build(model={"megatron": {"mtp_num_layers": 1, "softmax_type": "learnable", "qk_layernorm": True}})
    assert [text.split(":")[0].split(".")[-1] for text in caught.value.problems] == ["mtp_num_layers", "softmax_type"]


class TestTransformerEngine:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: True if name == "transformer_engine" else found(name)
        )

    def test_attention_dropout_is_refused(self):
        """Its masks depend on the layout."""
        text = problem(model={"backend": "transformer_engine", "attention_dropout": 0.1})
        assert "attention_dropout: got 0.1" in text and "set attention_dropout 0" in text

    def test_fused_modules_are_refused(self):
        """Its modules are fused by itself."""
        text = problem(model={"backend": "transformer_engine", "fuse": True})
        assert 'model.fuse: got true with megasdc.model.backend "transformer_engine"' in text

    def test_qk_layernorm_needs_one_tensor_rank(self):
        """Without a sum over tensor ranks these norms would drift apart."""
        model = {"backend": "transformer_engine", "megatron": {"qk_layernorm": True}}
        assert "parallel.tensor 2" in problem(model=model, parallel={"tensor": 2})
        assert build(model=model, parallel={"tensor": 1})
        assert build(model={**model, "backend": "torch"}, parallel={"tensor": 2})

    def test_further_fields_are_taken(self):
        """Transformer Engine's own modules read fields that ours do not."""
        assert build(model={"backend": "transformer_engine", "megatron": {"window_size": [8, 0]}})


@pytest.mark.parametrize(
    "part",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"elastic_checkpoint": False}, "checkpoint": {"load_universal": False}},
    ],
)
def test_harmless_neighbours_of_refused_combinations(part):
    """Offloading with gradients in the model's type, no offloading, and switches that are off are accepted."""
    assert build({"bf16": {"enabled": True}, **part})


def test_verified_checkpoints_need_audits():
    """A run that resumes from verified checkpoints alone and never verifies one is refused, with both remedies."""
    text = problem(checkpoint={"require_verified": "always"})
    assert "audit.enabled true" in text and '"auto"' in text
    assert build(checkpoint={"require_verified": "always"}, audit={"enabled": True}, determinism={"enabled": True})
    assert build(checkpoint={"require_verified": "never"})


def test_other_layouts_need_shared_storage():
    """Files of another layout's ranks are on other hosts: converting them is refused, with both fields named."""
    text = problem(checkpoint={"storage": "node_local", "other_layout": "convert"})
    assert "megasdc.checkpoint.other_layout" in text and 'set "refuse", or "shared"' in text


def test_node_local_storage_reaches_deepspeed():
    """checkpoint.storage is the one place to say that nodes share no folder."""
    assert build(checkpoint={"storage": "node_local"}).deepspeed["checkpoint"]["use_node_local_storage"] is True


class TestBatch:
    @given(
        micro=st.integers(1, 9),
        accumulation=st.integers(1, 9),
        data=st.integers(1, 9),
        tensor=st.sampled_from([1, 2, 4]),
        left_out=st.sampled_from(
            [None, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
        ),
    )
    @settings(max_examples=60, deadline=None)
    def test_any_one_of_three_may_be_left_out(self, micro, accumulation, data, tensor, left_out):
        """The absent size is derived from the others and the data-parallel size."""
        sizes = {
            "train_batch_size": micro * accumulation * data,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
        sizes.pop(left_out, None)
        config = build(sizes, parallel={"tensor": tensor, "pipeline": 2})
        assert resolve_batch(config, tensor * 2 * data) == (micro * accumulation * data, micro, accumulation, data)
        assert parse_config(config.resolved()) == config

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ({}, (4, 1, 1, 4)),
            ({"train_batch_size": 12}, (12, 1, 3, 4)),
            ({"gradient_accumulation_steps": 3}, (12, 1, 3, 4)),
            ({"train_micro_batch_size_per_gpu": 3}, (12, 3, 1, 4)),
        ],
    )
    def test_two_left_out(self, sizes, expected):
        """With two absent the micro-batch is 1, and nothing is accumulated unless the whole batch asks for it."""
        assert resolve_batch(build(sizes), 4) == expected

    def test_disagreement_prints_all_three_and_the_replicas(self):
        """Three sizes that disagree are all printed with the data-parallel size."""
        config = build({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2})
        with pytest.raises(ConfigError) as caught:
            check_layout(config, 2)
        text = str(caught.value)
        assert "got 10" in text and "per_gpu 3" in text and "steps 2" in text and "size 2" in text and "to 12" in text

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            ({"train_micro_batch_size_per_gpu": 3}, "make train_batch_size a multiple of 3, or"),
            ({"train_micro_batch_size_per_gpu": 10}, "a micro-batch: make train_batch_size at least 20"),
            ({"gradient_accumulation_steps": 3}, "multiple of 6"),
        ],
    )
    def test_indivisible_batch(self, sizes, said):
        """A batch that the derived size cannot make up is refused with the unit it must be a multiple of."""
        with pytest.raises(ConfigError, match=said):
            check_layout(build({"train_batch_size": 10, **sizes}), 2)

    @pytest.mark.parametrize("accumulation", [{}, {"gradient_accumulation_steps": 3}])
    def test_micro_batches_that_replicas_do_not_share_evenly(self, accumulation):
        """Some replicas take one fewer; the accumulation is the largest number, also where it is given."""
        sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, **accumulation}
        layout = check_layout(build(sizes), 3)
        assert (layout.train_batch_size, layout.micro_batch_size, layout.accumulation_steps) == (16, 2, 3)
        assert layout.is_uneven and not check_layout(build({**sizes, "gradient_accumulation_steps": 2}), 4).is_uneven
        with pytest.raises(ConfigError, match="enabled: got true, but the 8 micro-batches of a step"):
            check_layout(build(sizes, drop_compute={"enabled": True, "threshold": 1.0}), 3)

    @pytest.mark.parametrize("world_size", [0, 1, 3, 6])
    def test_world_size_must_fit(self, world_size):
        """Tensor x pipeline must divide the world size; both products are printed."""
        config = build(parallel={"tensor": 2, "pipeline": 2})
        with pytest.raises(ConfigError, match=f"= 4 does not divide the world size {world_size}"):
            check_layout(config, world_size)


def test_warnings_name_what_is_probably_not_meant():
    """A schedule of another length, intervals past the end and a useless keep_every are warned about, not refused."""
    config = build(
        {"scheduler": {"params": {"total_num_steps": 50, "warmup_num_steps": 100}}},
        training={"eval_interval": 101},
        checkpoint={"interval": 30, "keep_every": 40},
    )
    starts = [text.split(":")[0] for text in find_warnings(config)]
    assert starts == [
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
        "megasdc.training.eval_interval",
        "megasdc.checkpoint.keep_every",
    ]
    assert find_warnings(build()) == []


@pytest.mark.parametrize(
    ("health", "says"),
    [
        ({"hang_floor_s": 59.0, "slow_floor_s": 59.0}, None),
        (
            {"hang_floor_s": 60.0, "slow_floor_s": 900.0},
            "hang_floor_s: 60, and slow_floor_s 900, .* every hang",
        ),
        (
            {"hang_floor_s": 10.0, "slow_floor_s": 60.0},
            "slow_floor_s: 60, but .* is 60: hangs in starts, .* the timeout",
        ),
        ({"hang_floor_s": 60.0, "slow_floor_s": 10.0}, "hang_floor_s: 60, but .* hangs outside of starts"),
        ({"enabled": False}, None),
    ],
)
def test_hangs_that_end_by_the_timeout_are_warned_of(health, says):
    """Where a limit of health is not below the timeout of collectives, which then ends the run first."""
    found = find_warnings(build(parallel={"timeout_s": 60.0}, health=health))
    assert len(found) == (says is not None)
    assert says is None or re.search(says, found[0])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_consistent(name):
    """Every preset passes all checks by itself and has whole heads."""
    model = build(model={"preset": name}).megasdc.model
    assert head_width(model) * model.num_attention_heads == model.hidden_size
    assert ffn_width(model) % 64 == 0


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, published):
    """Counting weights from the fields gives the published size, with the models' own vocabularies."""
    model = ModelSection.model_validate({"preset": preset, **PRESETS[preset]})
    h, f, width = model.hidden_size, ffn_width(model), head_width(model)
    kv = width * (model.num_query_groups or model.num_attention_heads)
    llama2 = preset == "llama-7b"
    vocabulary = 50257 if preset.startswith("gpt2") else 32000 if llama2 else 128256
    matrices = h * (h + 2 * kv) + h * h + f * h * (3 if model.gated_mlp else 2)
    extra = (h + 2 * kv + h + f + h if model.bias else 0) + 2 * h * (2 if model.normalization == "LayerNorm" else 1)
    final = h * (2 if model.normalization == "LayerNorm" else 1)
    tables = vocabulary * h * (1 if model.tie_embeddings else 2)
    positions = model.max_positions * h if model.position_embedding == "learned" else 0
    total = model.num_layers * (matrices + extra) + final + tables + positions
    assert total == published


def test_every_field_that_the_model_builder_sets_is_refused():
    """A field that the builder takes from a section of its own cannot be set a second time in model.megatron."""
    import ast
    import inspect

    from megasdc.config.model import REFUSED_MEGATRON_FIELDS
    from megasdc.model.gpt import build_transformer_config

    (literal,) = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(build_transformer_config)))
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    ]
    fixed = {
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
        "attention_softmax_in_fp32",
    }
    assert {key.value for key in literal.value.keys} - fixed <= set(REFUSED_MEGATRON_FIELDS)


def test_megatron_field_names_are_those_of_the_class():
    """Reading Megatron-core's source gives the same names as importing the class."""
    import dataclasses

    from megatron.core.transformer import TransformerConfig

    from megasdc.config.model import MEGATRON_NEEDS, REFUSED_MEGATRON_FIELDS, TORCH_FIELDS, megatron_fields

    assert {field.name for field in dataclasses.fields(TransformerConfig)} <= megatron_fields()
    assert set(REFUSED_MEGATRON_FIELDS) | TORCH_FIELDS <= megatron_fields()
    assert set(MEGATRON_NEEDS) <= TORCH_FIELDS and not TORCH_FIELDS & set(REFUSED_MEGATRON_FIELDS)


def test_what_problems_name_are_fields() -> None:
    """Each path in the code of the configuration is that of a field, or of one that is gone."""
    files = Path(config.__file__).parent.glob("*.py")
    constants = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {text for text in constants if re.fullmatch(r"megasdc(\.[a-z_0-9]+)+", text)} - set(REMOVED)
    assert len(named) > 40
    fields = sorted(text for text in named if not text.startswith("megasdc.model.megatron."))
    assert [text for text in fields if locate_key(tuple(text.split(".")), WholeFile)[2] is None] == []


def test_everything_wrong_with_a_number_of_ranks_is_told_at_once(tmp_path):
    """Isolation without enough replicas, a fault on a rank that is not there and the batch, beside contradictions."""
    sections = {
        "sdc": {"policy": {"persistent": "isolate"}},
        "audit": {"enabled": True},
        "faults": [{"rank": 7}],
    }
    sizes = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**sizes, "megasdc": BASE["megasdc"] | sections}))
    with pytest.raises(ConfigError) as caught:
        load_config(file, find_more=lambda found: layout_problems(found, 1))
    for start in (
        "megasdc.audit.enabled: got true with megasdc.determinism.enabled false",
        'megasdc.sdc.policy.persistent: got "isolate" with megasdc.checkpoint.memory.interval 0',
        'megasdc.sdc.policy.persistent: got "isolate" with 1 replica; 3 are needed',
        "megasdc.faults.0.rank: got 7, but there are 1",
        "megasdc.audit.enabled: got true with 1 rank, one replica alone",
        "train_batch_size: got 10",
    ):
        assert any(one.startswith(start) for one in caught.value.problems), (start, caught.value.problems)
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["train_batch_size=ten"], find_more=lambda found: layout_problems(found, 1))
    assert not any("with 1 r" in one for one in caught.value.problems), "values that cannot be read have no layout"
