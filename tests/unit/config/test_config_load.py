"""One JSON file becomes a checked configuration, or every problem in it is reported at once."""

import copy
import json
import string

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megasdc.common.errors import ConfigError
from megasdc.config.deepspeed import DeepSpeedPart
from megasdc.config.fields import element_in, model_in
from megasdc.config.load import json_schema, load_config, nearest, parse_config
from megasdc.config.model import PRESETS
from megasdc.config.sections import MegasdcSection

MINIMAL = {
    "megasdc": {
        "data": {"path": "prepared/x"},
        "protect": "off",
        "training": {"steps": 100},
        "logging": {"run_dir": "runs/x"},
    },
}


def minimal(**sections):
    """Return the smallest valid file, with sections of ours merged in."""
    raw = copy.deepcopy(MINIMAL)
    for name, values in sections.items():
        raw["megasdc"][name] = {**raw["megasdc"].get(name, {}), **values}
    return raw


def problems_of(raw, overrides=()):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, overrides)
    return caught.value.problems


def every_section():
    """Yield (dotted path, class) of every object of the file whose keys are named."""
    todo = [("", DeepSpeedPart), ("megasdc", MegasdcSection)]
    while todo:
        path, section = todo.pop()
        yield path, section
        for name, info in section.model_fields.items():
            inner, element = model_in(info.annotation), element_in(info.annotation)
            here = f"{path}.{name}" if path else name
            if inner is not None:
                todo.append((here, inner))
            elif element is not None and (inner := model_in(element)) is not None:
                todo.append((f"{here}.0", inner))


KEYS = sorted((path, name) for path, section in every_section() for name in section.model_fields)


class TestDefaults:
    def test_minimal_file_trains_safely(self):
        """A file with only a data path, steps and a run folder gets ZeRO-1, AdamW, clipping and a schedule."""
        part = parse_config(MINIMAL).deepspeed
        assert part["zero_optimization"]["stage"] == 1
        assert part["gradient_clipping"] == 1.0
        assert part["optimizer"] == {
            "type": "AdamW",
            "params": {
                "lr": 3e-4,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
                "torch_adam": True,
                "fused": True,
            },
        }
        assert part["scheduler"]["type"] == "WarmupCosineLR"
        assert part["scheduler"]["params"] == {
            "total_num_steps": 100,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
            "cos_min_ratio": 0.1,
        }
        assert part["train_micro_batch_size_per_gpu"] == part["gradient_accumulation_steps"] == 1
        assert part["steps_per_print"] == 10**9

    @pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (9, 1), (1000, 100), (10**6, 2000)])
    def test_warmup_follows_the_run(self, steps, warmup):
        """Warm-up is a tenth of the run, at least 1 and at most 2000 steps."""
        config = parse_config(minimal(training={"steps": steps}))
        assert config.deepspeed["scheduler"]["params"]["warmup_num_steps"] == warmup

    def test_given_values_are_kept(self):
        """Defaults are filled around given values, never over them."""
        given_part = {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}},
            "gradient_clipping": 0,
            "steps_per_print": 5,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        }
        part = parse_config({**MINIMAL, **given_part}).deepspeed
        assert part["optimizer"]["type"] == "Adam"
        assert part["optimizer"]["params"]["lr"] == 1e-3
        assert "fused" not in part["optimizer"]["params"]
        assert part["scheduler"]["params"]["warmup_num_steps"] == 7
        assert part["scheduler"]["params"]["warmup_max_lr"] == 1e-3
        assert part["gradient_clipping"] == 0
        assert part["steps_per_print"] == 5
        assert part["data_types"] == {"grad_accum_dtype": "bf16"}

    def test_bf16_accumulates_in_fp32_unless_set(self):
        """bf16 alone gets fp32 accumulation, under either of its names; fp32 gets none."""
        for key in ("bf16", "bfloat16"):
            config = parse_config({**MINIMAL, key: {"enabled": True}})
            assert config.precision == "bf16"
            assert config.deepspeed["bf16"]["enabled"]
            assert "bfloat16" not in config.deepspeed
            assert config.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"
        assert "data_types" not in parse_config(MINIMAL).deepspeed
        assert parse_config({**MINIMAL, "fp16": {"enabled": True}}).precision == "fp16"

    def test_the_given_dict_is_left_alone(self):
        """parse_config changes nothing in its argument, also with a preset and overrides."""
        raw = minimal(model={"preset": "llama-1m"})
        before = copy.deepcopy(raw)
        parse_config(raw, ["megasdc.training.steps=7"])
        assert raw == before


class TestRoundTrip:
    @pytest.mark.parametrize("preset", [None, *PRESETS])
    def test_resolved_file_loads_to_the_same_configuration(self, preset, tmp_path):
        """Writing the resolved file and loading it gives an equal configuration, and the same file again."""
        raw = {**minimal(model={"preset": preset, "norm_epsilon": 1e-6}), "bf16": {"enabled": True}}
        config = parse_config(raw)
        path = tmp_path / "resolved with spaces.json"
        path.write_text(json.dumps(config.resolved()))
        again = load_config(path)
        assert again == config
        assert again.resolved() == config.resolved()
        assert again.source == str(path)

    def test_resolved_does_not_share_memory(self):
        """Changing the resolved dict does not change the configuration."""
        config = parse_config(MINIMAL)
        config.resolved()["optimizer"]["params"]["lr"] = 7
        assert config.deepspeed["optimizer"]["params"]["lr"] == 3e-4


class TestPreset:
    def test_the_schema_lists_the_presets(self):
        """Editors complete the name of a preset, and null stays allowed."""
        preset = json_schema()["$defs"]["ModelSection"]["properties"]["preset"]
        assert preset["anyOf"] == [{"enum": list(PRESETS), "type": "string"}, {"type": "null"}]
        assert preset["default"] is None and preset["description"]

    def test_given_fields_win_over_the_preset(self):
        """A preset fills only the fields that the file does not give, null included."""
        model = parse_config(
            minimal(model={"preset": "llama-1m", "num_layers": 6, "num_query_groups": None})
        ).megasdc.model
        assert (model.num_layers, model.num_query_groups, model.hidden_size) == (6, None, 128)
        assert model.normalization == "RMSNorm"

    def test_unknown_preset_names_the_nearest_and_the_list(self):
        """A misspelt preset is refused with the nearest name and all names."""
        (problem,) = problems_of(minimal(model={"preset": "lama-8b"}))
        assert problem.startswith("megasdc.model.preset:")
        assert "did you mean 'llama-8b'" in problem
        assert all(name in problem for name in PRESETS)


class TestProblems:
    def test_all_problems_of_all_kinds_at_once(self):
        """Syntax of overrides, unknown keys, types, ranges, missing keys, contradictions: one error lists all."""
        raw = minimal(
            model={"num_layers": "four", "hiden_size": 128, "num_attention_heads": 3},
            parallel={"partition": [1, 0], "sequence_parallel": True},
            data={"split": [0, 1, 1], "sources": [{"kind": "hub"}]},
        )
        del raw["megasdc"]["training"]["steps"]
        raw |= {
            "trian_batch_size": 8,
            "zero_optimization": {"stage": 3, "offload_param": {}},
            "amp": {"enabled": True},
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
        }
        starts = sorted(problem.split(":")[0] for problem in problems_of(raw, ["nonsense"]))
        assert starts == sorted(
            [
                "--set nonsense",
                "trian_batch_size",
                "zero_optimization.stage",
                "zero_optimization.offload_param",
                "amp",
                "bf16.enabled",
                "megasdc.model.num_layers",
                "megasdc.model.hiden_size",
                "megasdc.parallel.partition",
                "megasdc.parallel.sequence_parallel",
                "megasdc.data.split",
                "megasdc.data.sources.0.path",
                "megasdc.training.steps",
            ]
        )

    def test_a_problem_says_path_value_allowed_and_remedy(self):
        """One line holds the dotted path, the value got, the values allowed, the meaning and the default."""
        (problem,) = problems_of(minimal(model={"num_layers": 0}))
        assert problem == (
            "megasdc.model.num_layers: got 0; allowed: integer > 0 and <= 10000 (Number of transformer layers); leave "
            "it out for 2."
        )

    def test_no_contradiction_is_reported_about_a_field_that_is_wrong_by_itself(self):
        """A misspelt hidden_size gives one problem, not a second about its default not fitting the heads."""
        (problem,) = problems_of(minimal(model={"hidden_siz": 96, "num_attention_heads": 3}))
        assert "megasdc.model.hidden_siz: unknown key (value 96); did you mean megasdc.model.hidden_size?" in problem

    def test_a_key_in_the_wrong_place_is_sent_home(self):
        """`steps` at the top level is pointed to megasdc.training.steps, `lr` to its section."""
        problems = problems_of({**MINIMAL, "max_skipped_steps": 3, "optimizer": {"stage": 1}})
        assert "did you mean megasdc.training.max_skipped_steps?" in problems[0] + problems[1]
        assert "did you mean zero_optimization.stage?" in problems[0] + problems[1]

    @pytest.mark.parametrize("stage", [0, 2, 3])
    def test_other_zero_stages_are_refused_with_the_reason(self, stage):
        """Only ZeRO-1 goes with the pipeline engine."""
        (problem,) = problems_of({**MINIMAL, "zero_optimization": {"stage": stage}})
        assert "pipeline engine" in problem and f"got {stage}" in problem

    def test_wrong_json_types_are_not_converted(self):
        """A number in quotes, a number for a switch, a fraction for a count: all refused."""
        raw = minimal(training={"steps": "10"}, logging={"progress_bar": 1}, data={"seed": 1.5})
        assert len(problems_of(raw)) == 3

    def test_sections_of_a_wrong_type(self):
        """A list, a number or null in place of an object is a problem, not a crash."""
        for wrong in ([], 3, None, "x"):
            assert problems_of({"megasdc": wrong})
            assert problems_of({**MINIMAL, "optimizer": wrong})
            assert problems_of({"megasdc": {**MINIMAL["megasdc"], "model": wrong}})
        assert len(problems_of({"megasdc": {}})) == 3
        assert problems_of({}) == ["megasdc: missing; needed: object."]

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from([key for _, key in KEYS]), inner, max_size=4)
            ),
            max_leaves=12,
        )
    )
    @settings(max_examples=150, deadline=None)
    def test_no_json_value_crashes_the_checks(self, value):
        """Whatever the file holds, the answer is a configuration or a ConfigError."""
        section = {**MINIMAL["megasdc"], **value} if isinstance(value, dict) else value
        for raw in ({"megasdc": section}, {**MINIMAL, **value} if isinstance(value, dict) else {"fp16": value}):
            try:
                parse_config(raw)
            except ConfigError as error:
                assert error.problems


def one_edit(word, kind, place, letter):
    """Misspell a word by one edit: drop, double, swap or replace the letter at a place."""
    place %= len(word)
    match kind:
        case "drop":
            return word[:place] + word[place + 1 :]
        case "insert":
            return word[:place] + letter + word[place:]
        case "swap":
            return word[:place] + word[place + 1 : place + 2] + word[place] + word[place + 2 :]
    return word[:place] + letter + word[place + 1 :]


@example(("megasdc.sdc.always_on", "tokens"), "drop", 5, "a")
@given(
    st.sampled_from(KEYS),
    st.sampled_from(["drop", "insert", "swap", "replace"]),
    st.integers(0, 40),
    st.sampled_from(string.ascii_lowercase + "_"),
)
@settings(max_examples=300, deadline=None)
def test_every_misspelling_by_one_edit_is_refused(key, kind, place, letter):
    """A key of any object, misspelt by one edit, is refused by name, and the valid name is offered."""
    path, name = key
    wrong = one_edit(name, kind, place, letter)
    sections = dict(every_section())
    assume(wrong and wrong not in sections[path].model_fields)
    inner: dict = {wrong: True}  # no secret, whatever its name is
    raw = copy.deepcopy(MINIMAL)
    at = raw
    lists = ("sources", "blend", "hooks", "optimizer_hooks", "faults", "process_faults", "delay")
    for step in path.split(".") if path else []:
        at = at[0] if isinstance(at, list) else at.setdefault(step, [{}] if step in lists else {})
    at.update(inner)
    dotted = f"{path}.{wrong}" if path else wrong
    (problem,) = [text for text in problems_of(raw) if text.startswith(f"{dotted}: ")]
    assert "unknown key" in problem or "not supported" in problem
    if len(name) > 4 and "unknown key" in problem:
        near = nearest(wrong, sections[path].model_fields)
        assert near is not None and f"did you mean {path}.{near}".replace(" .", " ") in problem


class TestFile:
    def write(self, tmp_path, text):
        path = tmp_path / "a b" / "run config.json"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return path

    def error(self, path):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value)

    def test_syntax_error_gives_line_and_column(self, tmp_path):
        """A missing comma is reported with its line, column and text, and the file."""
        path = self.write(tmp_path, '{\n  "fp16": {}\n  "bf16": {}\n}')
        message = self.error(path)
        assert "line 3, column 3" in message and '"bf16": {}' in message and str(path) in message

    @pytest.mark.parametrize(
        "text", ["", "   ", "[]", "3", "{", '{"a": NaN}', "[" * 100_000, '{"fp16": {"loss_scale": Infinity}}']
    )
    def test_not_a_json_object(self, tmp_path, text):
        """An empty file, another root, NaN, a file of brackets: refused with one problem."""
        assert "1 problem" in self.error(self.write(tmp_path, text))

    def test_duplicate_keys_are_refused_with_their_path(self, tmp_path):
        """A key that stands twice is reported by dotted path, next to every other problem."""
        path = self.write(
            tmp_path, '{"fp16": {"enabled": true, "enabled": false}, "megasdc": {"data": {}, "data": {}}}'
        )
        message = self.error(path)
        assert "fp16.enabled: the key occurs more than once" in message
        assert "megasdc.data: the key occurs more than once" in message
        assert "megasdc.training: missing" in message

    def test_missing_file_folder_and_not_text(self, tmp_path):
        """A path that is absent, a folder, or holds bytes that are not UTF-8."""
        assert "No such file" in self.error(tmp_path / "absent.json")
        assert "cannot be read" in self.error(tmp_path)
        (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
        assert "not UTF-8" in self.error(tmp_path / "bytes.json")

    def test_byte_order_mark_is_accepted(self, tmp_path):
        """A file that an editor began with a byte-order mark loads."""
        path = self.write(tmp_path, "\ufeff" + json.dumps(MINIMAL))
        assert load_config(path) == parse_config(MINIMAL)


class TestOverrides:
    def test_values_are_json_else_text(self):
        """Numbers, lists, null, objects and bare words each become what they look like."""
        config = parse_config(
            MINIMAL,
            [
                "megasdc.training.steps=50",
                "megasdc.data.path=my data/x=y",
                "megasdc.data.split=[9,1,0]",
                "megasdc.model.preset=gpt2-1m",
                "megasdc.checkpoint.folder=null",
                'bf16={"enabled": true}',
                "optimizer.params.lr=1e-3",
            ],
        )
        assert config.megasdc.training.steps == 50
        assert config.megasdc.data.path == "my data/x=y"
        assert config.megasdc.data.split == [9, 1, 0]
        assert config.megasdc.model.num_layers == 4
        assert config.precision == "bf16"
        assert config.deepspeed["optimizer"]["params"]["lr"] == 1e-3

    def test_list_index_reaches_into_given_and_default_lists(self):
        """One item of a list changes, also where the file leaves the list to its default."""
        config = parse_config(
            MINIMAL,
            ["megasdc.data.split.0=90", "optimizer.params.betas.1=0.99", "megasdc.data.sources.0.max_documents=5"],
        )
        assert config.megasdc.data.split == [90, 1, 1]
        assert config.deepspeed["optimizer"]["params"]["betas"] == [0.9, 0.99]
        assert config.megasdc.data.sources[0].max_documents == 5

    def test_later_override_wins(self):
        """Overrides apply in order."""
        assert (
            parse_config(MINIMAL, ["megasdc.training.steps=5", "megasdc.training.steps=6"]).megasdc.training.steps == 6
        )

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("no_equals", "needs the form path=value"),
            ("=3", "needs the form"),
            ("a..b=3", "needs the form"),
            ("megasdc.data.split.3=1", "allowed: 0 to 2"),
            ("megasdc.data.split.x=1", "no index"),
            ("megasdc.training.steps.more=1", "nothing inside"),
            ("megasdc.training.step=1", "did you mean megasdc.training.steps?"),
            ("megasdc.logging.run_dir=2024", "--set 'megasdc.logging.run_dir=\"2024\"'"),
            ("fp16.loss_scale=NaN", 'got "NaN"'),
        ],
    )
    def test_bad_overrides(self, text, part):
        """Each bad override is one problem that says what to write."""
        (problem,) = problems_of(minimal(data={"split": [98, 1, 1]}), [text])
        assert part in problem


@pytest.mark.parametrize(
    ("section", "entry"),
    [
        ("hooks", "absent.py:MyHook"),
        ("hooks", "no_such_package:MyHook"),
        ("optimizer_hooks", {"hook": "file", "path": "absent.py", "name": "MyHook"}),
        ("delay", {"kind": "trace", "path": "absent.npy"}),
    ],
)
def test_files_of_a_stored_configuration_may_be_on_another_host(section, entry):
    """They are refused before a run, and not where what a run has stored is read."""
    raw = copy.deepcopy(MINIMAL)
    raw["megasdc"][section] = [entry]
    assert any("not found" in text or "not a file" in text for text in problems_of(raw))
    assert len(getattr(parse_config(raw, stored=True).megasdc, section)) == 1
