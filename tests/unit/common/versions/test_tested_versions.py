"""Which versions are permitted and were run, and what a start says of others."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common import versions
from megasdc.common import versions as tested
from megasdc.common.errors import LaunchError
from megasdc.common.versions import (
    COMBINATIONS,
    NAMES,
    NOT_RUN,
    PERMITTED,
    RUN_HERE,
    RUN_ON_GPU,
    Combination,
    check_range,
    range_problems,
    untested_versions,
    versions_state,
)

ROOT = Path(__file__).parents[4]
CPU = Combination("3.11.7", "2.13.0", "0.19.8", "0.16.1", RUN_HERE, "all", "2026-01-01")
GPU = Combination("3.12.1", "2.12.0", "0.19.8", "0.19.2", RUN_ON_GPU, "all", "2026-01-01")


@pytest.fixture(autouse=True)
def two_combinations(monkeypatch, request):
    """Most tests have a list of their own."""
    if "real_list" not in request.fixturenames:
        for module in (tested, versions):
            monkeypatch.setattr(module, "COMBINATIONS", (CPU, GPU))
    monkeypatch.delenv(versions.ANY_VARIABLE, raising=False)


@pytest.fixture
def real_list():
    """The list as it is."""


@pytest.mark.parametrize(
    ("changed", "on_gpu", "state"),
    [
        ({}, False, RUN_HERE),
        ({}, True, RUN_HERE),
        ({"python": "3.11.2", "torch": "2.13.1+cpu", "megatron-core": "0.16.0"}, False, RUN_HERE),
        ({"deepspeed": "0.19.7"}, False, NOT_RUN),
        ({"torch": "2.12.0"}, False, NOT_RUN),
        ({"python": "3.12.9", "torch": "2.12.0a0+b4e4ee8.nv25", "megatron-core": "0.19.2"}, True, RUN_ON_GPU),
    ],
)
def test_a_state_is_that_of_the_combination(changed, on_gpu, state):
    """Versions count together; patch releases count for DeepSpeed alone, builds never."""
    assert versions_state(CPU.versions | changed, on_gpu) == state


def test_what_was_run_gives_no_warning():
    """Nothing is said of a combination of the list on the device that it was run on."""
    assert untested_versions(CPU.versions, on_gpu=False) is None
    assert untested_versions(GPU.versions, on_gpu=True) is None


def test_unit_tests_alone_count_as_not_run(monkeypatch):
    """A combination of the list with which nothing was trained is warned of, and not offered as one that was run."""
    alone = Combination("3.13.0", "2.11.0", "0.19.4", "0.17.1", NOT_RUN, "unit tests alone", "2026-01-01")
    for module in (tested, versions):
        monkeypatch.setattr(module, "COMBINATIONS", (CPU, alone))
    text = untested_versions(alone.versions, on_gpu=False)
    assert "were not run together (Python 3.13.0, PyTorch 2.11.0" in text
    assert tested.spell(alone.versions) not in text.partition("what was run:")[2]


def test_what_was_not_run_is_named_with_what_was():
    """The warning has the installed versions, the odd one, and the whole list."""
    text = untested_versions(CPU.versions | {"torch": "2.10.0"}, on_gpu=False)
    assert text.startswith(
        "Python 3.11.7, PyTorch 2.10.0, DeepSpeed 0.19.8, Megatron-core 0.16.1 were not run together"
    )
    assert "(PyTorch 2.10.0 in no combination)" in text
    assert tested.spell(CPU.versions) in text and tested.spell(GPU.versions) in text
    assert "were run on CPUs only" in untested_versions(CPU.versions, on_gpu=True)
    assert "were run on GPUs only" in untested_versions(GPU.versions, on_gpu=False)
    unknown = {name: version for name, version in CPU.versions.items() if name != "megatron-core"}
    assert "Megatron-core of unknown version were not run" in untested_versions(unknown, on_gpu=False)


@pytest.mark.parametrize(
    ("component", "version"),
    [("python", "3.10.4"), ("python", "3.14.0"), ("torch", "2.9.1"), ("torch", "2.14.0"), ("deepspeed", "0.20.0")],
)
def test_outside_the_range_a_start_is_refused(component, version, monkeypatch):
    """The error has name, version, range and remedy; the variable in it lets the start go on."""
    with pytest.raises(LaunchError, match=re.escape(f"{NAMES[component]} {version} is outside")) as caught:
        check_range(CPU.versions | {component: version})
    assert str(PERMITTED[component]) in str(caught.value) and "MEGASDC_ANY_VERSION=1" in str(caught.value)
    assert caught.value.exit_code == 78
    monkeypatch.setenv("MEGASDC_ANY_VERSION", "1")
    check_range(CPU.versions | {component: version})


def test_a_release_candidate_of_an_image_is_in_range():
    """NVIDIA's images hold builds such as 2.10.0a0."""
    assert range_problems({"torch": "2.10.0a0+b4e4ee81d3.nv25.12"}) == []


def test_the_list_is_within_the_range(real_list):
    """Every combination that was run is permitted, has a state and a date, and stands once."""
    assert [range_problems(one.versions) for one in COMBINATIONS if range_problems(one.versions)] == []
    assert {one.state for one in COMBINATIONS} <= {RUN_HERE, RUN_ON_GPU, NOT_RUN}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", one.date) and one.what for one in COMBINATIONS)
    assert len({(*one.versions.values(), one.state) for one in COMBINATIONS}) == len(COMBINATIONS)


def test_the_pins_are_a_combination_that_was_run(real_list):
    """launch/constraints.txt holds versions that the list has."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "launch" / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {name: pins[name] for name in NAMES if name != "python"}
    assert pinned in [{name: one.versions[name] for name in pinned} for one in COMBINATIONS if one.state == RUN_HERE]


def test_setup_permits_the_range():
    """setup.py takes the first release of each range and its last, and nothing after it."""
    from packaging.specifiers import SpecifierSet

    text = (ROOT / "setup.py").read_text()
    wanted = {name: re.search(rf'"{name}([><=][^"]*)"', text)[1] for name in NAMES if name != "python"}
    wanted["python"] = re.search(r'python_requires="([^"]*)"', text)[1]
    for name, permitted in PERMITTED.items():
        first, last = permitted.minors[0], permitted.minors[-1]
        major, minor = last.split(".")
        specifier = SpecifierSet(wanted[name])
        assert all(specifier.contains(f"{version}.0") for version in permitted.minors), name
        assert specifier.contains(f"{last}.99") and not specifier.contains(f"{major}.{int(minor) + 1}.0"), name
        assert not specifier.contains(f"{major}.{int(first.split('.')[1]) - 1}.9"), name
    assert SpecifierSet(wanted["torch"]).contains("2.10.0a0+b4e4ee8", prereleases=True)


def test_builds_of_an_image_have_a_place_in_the_tables(monkeypatch):
    """A version with letters stands between others, oldest first."""
    builds = [replace(GPU, torch=version) for version in ("2.12.0", "2.9.1", "2.10.0a0+b4e4ee8", "2.10.0")]
    monkeypatch.setattr(tested, "COMBINATIONS", builds)
    assert " 2.9.1, 2.10.0, 2.10.0a0+b4e4ee8, 2.12.0 |" in tested.render_tables()


def test_the_tables_show_the_three_states():
    """Each permitted release stands under its state."""
    lines = tested.render_tables().splitlines()
    assert lines[0].split(" | ")[2:] == [RUN_HERE, RUN_ON_GPU, f"{NOT_RUN} |"]
    assert "| PyTorch | 2.10 to 2.13 | 2.13.0 | 2.12.0 | 2.10, 2.11 |" in lines
    assert "| DeepSpeed | 0.19 | 0.19.8 | 0.19.8 | other patch releases |" in lines
    assert "| 3.12.1 | 2.12.0 | 0.19.8 | 0.19.2 | run on a GPU machine | all | 2026-01-01 |" in lines
