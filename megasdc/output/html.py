"""Results as files: HTML pages with everything that they need, figures as PNG and SVG, and CSV of all numbers.

Chromium draws pictures as they are in the page: headless, it opens a page of the same figures, without the network. Its
script exports every figure in both formats by plotly and writes them into the document, which ``--dump-dom`` prints.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megasdc.common.errors import StorageError
from megasdc.common.program import write_atomically
from megasdc.output.figure import Figure
from megasdc.output.page import Page, Table


def write_page(page: Page, path: Path, option: str = "--html", made: str = "") -> None:
    """Writes a result as one file that needs no network.

    Args:
        path: the file; replaced.
        page: the result.
        option: command-line option that names the file, for the error message.
        made: last line of the page.

    Raises:
        StorageError: it cannot be written.
    """
    data = {"figures": [one.as_dict() for one in page.figures], "steps": page.steps}
    write_template("page.html", path, option, page=page, made=made, data=data)


def page_text(page: Page) -> str:
    """HTML of a page without figures and scripts: it cannot be sorted or filtered, and is small."""
    return _render("page.html", page=page, made="", data=None)


def write_template(template: str, path: Path, option: str, **values: Any) -> None:
    """Renders a template of ``megasdc/output/templates`` and writes it; ``option`` is named in the error message.

    In ``values`` every text is escaped; ``data`` is for the script, JSON values only.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    text = _render(template, plotly=Markup(get_plotlyjs()), **values)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megasdc.output", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


NAMES = ("chromium", "chromium-browser", "google-chrome")
"""Names of the program, in the order of the search."""
TIMEOUT_S = 300
WIDTH, HEIGHT, SCALE = 900, 420, 2
"""Size of a picture in pixels, higher where rows or legend need it, and PNG dots per pixel."""
_DONE = re.compile(r'<script type="application/json" id="pictures">(.*?)</script>', re.DOTALL)


class NoPictures(Exception):
    """Pictures could not be drawn; the message says why and what to do."""


def find_chromium() -> str:
    """Path of the browser, searched on PATH; raises ``NoPictures`` where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoPictures(
            f"no PNG and SVG were drawn: none of {', '.join(NAMES)} is on PATH; install it (Debian: apt-get install "
            "chromium) and call again"
        )
    return found


def write_tables(folder: Path, figures: Sequence[Figure], tables: Sequence[Table]) -> list[Path]:
    """Writes the numbers of every figure and table as CSV, a file of its name each; empty tables have none.

    Raises:
        StorageError: a file cannot be written.
    """
    texts = {one.name: one.as_csv() for one in figures} | {one.name: one.as_csv() for one in tables if one.rows}
    return [_write(folder / f"{name}.csv", text.encode()) for name, text in texts.items()]


def write_pictures(folder: Path, figures: Sequence[Figure], steps: Sequence[int] | None) -> list[Path]:
    """Draws every figure as PNG and SVG, on white; ``steps``: range of the step axis, None: no figure has one.

    Raises:
        NoPictures: there is no Chromium, or it did not draw them.
        StorageError: a file cannot be written.
    """
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="megasdc_pictures_") as scratch:
        page = Path(scratch) / "pictures.html"
        drawn = [one.as_dict() | {"title": one.title} for one in figures]
        size = {"width": WIDTH, "height": HEIGHT, "scale": SCALE}
        empty = Page("Figures", "Figures")
        data = {"figures": drawn, "steps": steps, "size": size}
        write_template("pictures.html", page, "--figures", page=empty, data=data)
        found = _draw(program, page, Path(scratch) / "profile")
    written = []
    for one in figures:
        for form in ("png", "svg"):
            written.append(_write(folder / f"{one.name}.{form}", _content(found[one.name][form])))
    return written


def _draw(program: str, page: Path, profile: Path) -> dict[str, dict[str, str]]:
    """``data:`` URL of each picture, by figure and format."""
    options = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
    options += ["--disable-background-networking", f"--user-data-dir={profile}", "--force-prefers-reduced-motion"]
    options += ["--virtual-time-budget=600000", f"--window-size={WIDTH},{HEIGHT}", "--dump-dom"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses its sandbox to root
    try:
        done = subprocess.run(
            [program, *options, page.as_uri()], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPictures(f"no PNG and SVG were drawn: {program} did not answer: {error}") from error
    match = _DONE.search(done.stdout)
    if match is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise NoPictures(
            f"no PNG and SVG were drawn: {program} ended with {done.returncode} and without pictures: {last}"
        )
    found: dict[str, dict[str, str]] = json.loads(match.group(1))
    return found


def _content(address: str) -> bytes:
    """Content of a ``data:`` URL."""
    head, _, body = address.partition(",")
    return base64.b64decode(body) if head.endswith(";base64") else unquote(body).encode()


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --figures") from error
    return path
