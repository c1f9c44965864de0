"""Does the page of a comparison say what was found, draw it in a real browser, and need nothing but itself?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, choose, needs_browser
from hand_made import write_checkpoint
from typer.testing import CliRunner

from megasdc.cli.compare import checkpoints_script as app
from megasdc.tensors.bits import count_flips

NAME = "2.layer.mlp.linear_fc2.weight"
HARMED = "layer_02-model_01-model_states.pt"


def run(*arguments: object) -> Any:
    """The real command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a copy: one bit of a weight, a run of a moment, a NaN, and a missing file."""
    folder = tmp_path_factory.mktemp("page")
    good = write_checkpoint(folder / "good", layout=(2, 1, 2))
    bad = Path(shutil.copytree(good, folder / "bad" / good.name))
    state = torch.load(bad / HARMED, weights_only=False)
    state["layer.mlp.linear_fc2.weight"].view(torch.int16)[3, 5] ^= 1 << 9
    torch.save(state, bad / HARMED)
    shard = bad / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    moments = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    moments["exp_avg"][2:9] = -moments["exp_avg"][2:9]
    moments["exp_avg_sq"][-1] = float("nan")
    torch.save(state, shard)
    (bad / "rank_00003_state.pt").unlink()
    return good, bad


@pytest.fixture(scope="module")
def page(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that comparison."""
    path = tmp_path_factory.mktemp("written") / "page.html"
    assert run(*pair, "--html", path).exit_code == 1
    return path


def test_flipped_bits_are_counted_as_numpy_counts_them(tmp_path: Path) -> None:
    """Of every bit, in how many elements it differs; in bf16 and fp32, past one byte, signs too."""
    for dtype, ints, width in ((torch.float32, np.uint32, 32), (torch.bfloat16, np.uint16, 16)):
        pair = torch.randn(2, 1000, generator=torch.Generator().manual_seed(5)).to(dtype)
        one, other = (tensor.view(torch.uint8).numpy().view(ints) for tensor in pair)
        wanted = [int(((one ^ other) >> bit & 1).sum()) for bit in range(width)]
        assert count_flips(*pair) == wanted
        for name, tensor in zip("ab", pair, strict=True):
            torch.save({"x": tensor.clone()}, tmp_path / f"{name}.pt")
        (found,) = json.loads(run(tmp_path / "a.pt", tmp_path / "b.pt", "--json").stdout)["findings"]
        assert found["measure"]["flips"] == wanted
        assert found["measure"]["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn_and_says_the_verdict_first(browser: Browser, page: Path) -> None:
    """No error in the console, nothing from the network, every figure drawn, the verdict as the first words."""
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert browser.errors == []
        assert browser.run("document.body.innerText.trim()").startswith("Different: 4 of ")
        assert browser.run("[...document.querySelectorAll('.figure')].every(f => f.querySelector('.main-svg'))")
        assert browser.run("document.querySelectorAll('.figure').length") == 3
        shade = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (shade == "rgb(255, 255, 255)") is not dark
        paper = browser.run("find('map').layout.paper_bgcolor")
        assert (paper == "#ffffff") is not dark


@needs_browser
def test_the_table_has_what_is_known_of_each_finding(browser: Browser, page: Path) -> None:
    """Tensor, slot, pattern with its usual cause, owner with host, counts, ULP and relative difference."""
    browser.open(page)
    rows = browser.run("[...find('findings').tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText))")
    assert len(rows) == 4
    row = next(row for row in rows if row[1] == NAME)
    assert (row[2], row[5], row[6], row[7]) == ("weight", "1 of 128", "[3, 13]", "512")
    assert row[3].startswith("bit (bit 9)\n")
    assert "a flip in memory" in row[3]
    assert "rank 1 (dp 0, pp 0, tp 1) on n" in row[4]
    assert "changed since it was saved" in row[4]


@pytest.mark.slow
@needs_browser
def test_the_filter_leaves_what_was_asked_for(browser: Browser, page: Path) -> None:
    """By words, by slot and by pattern; the number shown is told, and an empty filter shows all again."""
    browser.open(page)
    visible = "[...find('findings').tBodies[0].rows].filter(row => row.offsetHeight).length"

    def filtered(**values: str) -> tuple[int, str]:
        controls = {"text": "input", "only_slot": "[data-column='2']", "only_pattern": "[data-column='3']"}
        for name, control in controls.items():
            browser.run(
                f"(() => {{ const control = document.querySelector(`[data-table=findings] {control}`);"
                f"control.value = {json.dumps(values.get(name, ''))};"
                "control.dispatchEvent(new Event('input', { bubbles: true })); })()"
            )
        return browser.run(visible), browser.run("find('findings_shown').textContent")

    assert filtered() == (4, "4 of 4 rows shown")
    assert filtered(text="LINEAR_FC2 rank 1") == (1, "1 of 4 rows shown")
    assert filtered(only_slot="exp_avg") == (1, "1 of 4 rows shown")
    assert filtered(only_pattern="missing", only_slot="exp_avg")[0] == 0
    assert filtered(only_pattern="missing")[0] == 1
    browser.open(page, width=390)
    assert filtered(only_slot="weight")[0] == 1


@needs_browser
def test_the_heat_map_shows_the_slot_and_the_measure_chosen(browser: Browser, page: Path) -> None:
    """The share of one element of 128 as a logarithm where it differs, equal elsewhere; slots and shades change it."""
    browser.open(page)

    def cell(slot: str, measure: str) -> Any:
        choose(browser, "Slot", slot)
        choose(browser, "Shade", measure)
        return browser.run(
            "(() => { const [equal, differs] = find('map').data, layer = differs.x.indexOf('2');"
            "const at = differs.y.indexOf('layer.mlp.linear_fc2.weight');"
            "return [equal.z[at][layer], differs.z[at][layer]]; })()"
        )

    assert cell("weight", "share of elements that differ") == [None, pytest.approx(np.log10(1 / 128))]
    expected = run_relative(page)
    assert cell("weight", "largest relative difference") == [None, pytest.approx(np.log10(expected), abs=1e-6)]
    choose(browser, "Slot", "master")
    assert browser.run("find('map').data.length") == 1, "nothing differs in the masters"
    choose(browser, "Slot", "weight")
    bars = browser.run("find('bits_bfloat16').data.map(one => [one.name, one.y.reduce((a, b) => a + b, 0)])")
    assert bars == [["sign", 0], ["exponent", 1], ["mantissa", 0]]
    assert browser.run("find('bits_float32').offsetHeight") == 0


def run_relative(page: Path) -> float:
    """The relative difference of the one flipped weight, from the page's own comparison as JSON."""
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    (drawn,) = (one for one in data["figures"] if one["name"] == "map")
    assert {one["chosen"][0] for one in drawn["versions"]} == {"all", "weight", "master", "exp_avg", "exp_avg_sq"}
    from hand_made import make_whole

    value = make_whole()["weight"][NAME][3, 13]
    flipped = (value.view(torch.int16) ^ (1 << 9)).view(torch.bfloat16)
    one, other = float(value), float(flipped)
    return abs(one - other) / max(abs(one), abs(other))


@pytest.mark.slow
@needs_browser
def test_it_reads_on_a_phone_and_on_paper(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Nothing is wider than the screen or the paper; on paper light colours whatever the screen, and no controls."""
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert (
        browser.run(
            "Math.max(...[...find('findings').querySelectorAll('td')].map(c => c.getBoundingClientRect().right))"
        )
        <= 390
    )
    browser.open(page, width=720, dark=True, media="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    assert browser.run("find('map').layout.paper_bgcolor") == "#ffffff"
    assert browser.run("document.querySelector('.controls').offsetHeight") == 0
    assert browser.print_pdf().startswith(b"%PDF")
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_names_in_a_file_are_text_not_markup(browser: Browser, tmp_path: Path) -> None:
    """A tensor called like a script is shown and not run, in table, heat map and data."""
    name = "</script><script>window.acted = 1</script><img src=x onerror='window.acted = 1'>"
    for file, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({name: torch.tensor([value, 3.0])}, tmp_path / file)
    assert run(tmp_path / "a.pt", tmp_path / "b.pt", "--html", tmp_path / "x.html").exit_code == 1
    browser.open(tmp_path / "x.html")
    assert browser.run("typeof window.acted") == "undefined"
    assert name in browser.run("find('findings').innerText")
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_equal_checkpoints_have_a_page_too(browser: Browser, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """It says that every bit is equal, and has no empty table or figure."""
    assert run(pair[0], pair[0], "--html", tmp_path / "same.html").exit_code == 0
    browser.open(tmp_path / "same.html")
    text = browser.run("document.body.innerText.trim()")
    assert text.startswith("Same: all ")
    assert browser.run("document.querySelectorAll('table, .figure').length") == 0
    assert browser.errors == []


def test_a_page_that_cannot_be_written_is_exit_code_two(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The place is named, and what to do; a file that does not end in .html is a wrong command line."""
    (tmp_path / "file").write_text("")
    refused = run(pair[0], pair[0], "--html", tmp_path / "file" / "x.html")
    assert refused.exit_code == 2
    assert "x.html cannot be written" in refused.output
    assert "choose another --html" in refused.output
    assert run(pair[0], pair[0], "--html", tmp_path / "page.txt").exit_code == 2
    assert not (tmp_path / "page.txt").exists()
