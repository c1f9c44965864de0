"""Whatever stands in whatever field, a configuration is refused with a message or can be used; nothing else happens."""

import copy
import json

import pytest
from field_values import context_of, fields, misspelt, put, values_of

from megasdc.common.errors import ConfigError
from megasdc.config.checks import check_layout, find_warnings
from megasdc.config.load import parse_config
from megasdc.config.read import dotted
from megasdc.train.memory import host_memory_bytes, memory_of_stages, memory_warning

SAMPLED = 4
"""Values of each field in the quick test, other ones for each field."""


def check(raw, name):
    """Check a file as `check-config` and the ranks do; the problems if it is refused."""
    try:
        config = parse_config(raw)
    except ConfigError as error:
        assert error.problems
        assert all(problem.encode() for problem in error.problems), f"{name}: a message that cannot be printed"
        return error.problems
    for world_size in (1, 2, 4, 10**9):
        try:
            layout = check_layout(config, world_size)
            stages = memory_of_stages(config, 1, layout.data, layout.micro_batch_size)
            memory_warning(config, stages, host_memory_bytes())
        except ConfigError as error:
            assert str(error).encode()
    assert all(warning.encode() for warning in find_warnings(config))
    resolved = json.dumps(config.resolved(), allow_nan=False)
    assert parse_config(json.loads(resolved)) == config, f"{name}: what is written to resolved.json is another run"
    return None


def check_fields(most=None):
    """Put values into fields, at most so many into each; how many were checked."""
    count = 0
    for number, (path, annotation) in enumerate(fields()):
        base, values = context_of(path), list(values_of(annotation))
        if most is not None:
            values = [values[(number * most + i) % len(values)] for i in range(most)]
        for value in values:
            raw = copy.deepcopy(base)
            put(raw, path, value)
            try:
                check(raw, dotted(path))
            except Exception as error:
                error.add_note(f"{dotted(path)} = {value!r:.80}")
                raise
            count += 1
    return count


def test_the_contexts_are_valid():
    """What each field is tried in is a configuration that is accepted, so that the field itself decides."""
    contexts = {json.dumps(context_of(path)): dotted(path) for path, _ in fields()}
    for text, name in contexts.items():
        assert check(json.loads(text), name) is None, name


@pytest.mark.slow
def test_some_values_of_every_field():
    """A few values in every field: a refusal that can be printed, or a configuration that is written and read again."""
    assert check_fields(SAMPLED) > 2000


@pytest.mark.full
def test_all_values_of_every_field():
    """Every wrong type, null, negative, 0, huge, NaN, empty, text and path in every field."""
    assert check_fields() > 30_000


def check_misspelt(most=None):
    """Put misspelt keys beside fields, beside each or at most one of each section; how many were checked."""
    count = 0
    done = set()
    for path, _ in fields():
        section, key = path[:-1], path[-1]
        if not isinstance(key, str) or "megatron" in section or (most is not None and section in done):
            continue
        done.add(section)
        valid = {other[-1] for other, _ in fields() if other[:-1] == section} if most is None else {key}
        for name in [name for name in misspelt(key) if name not in valid][:most]:
            raw = context_of(path)
            put(raw, (*section, name), 1)
            problems = check(raw, dotted(path))
            assert problems, (section, name)
            assert any(problem.startswith(dotted((*section, name))) for problem in problems), problems
            count += 1
    return count


def test_misspelt_neighbours_are_refused():
    """In every section a key that is no field is refused by its path."""
    assert check_misspelt(most=3) > 100


@pytest.mark.full
def test_all_misspelt_neighbours_are_refused():
    """Beside every field, keys that are near it and keys that are near none are refused by their path."""
    assert check_misspelt() > 3000
