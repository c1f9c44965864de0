"""Results as HTML pages: one file each, with everything that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasdc.common.errors import StorageError
from megasdc.common.program import write_atomically
from megasdc.output.page import Page


def write_page(page: Page, path: Path, option: str = "--html", made: str = "") -> None:
    """Writes a result as one file that needs no network.

    Args:
        path: the file; replaced.
        option: of the command line that names the file, for the error message.
        made: the last line of the page.

    Raises:
        StorageError: it cannot be written.
    """
    data = {"figures": [one.as_dict() for one in page.figures], "steps": page.steps}
    write_template("page.html", path, option, page=page, made=made, data=data)


def write_template(template: str, path: Path, option: str, **values: Any) -> None:
    """Renders a template of ``megasdc/report/templates`` and writes it; ``option`` is named in the error message.

    In ``values`` every text is escaped; ``data`` is for the script, JSON values only.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("megasdc.output", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(plotly=Markup(get_plotlyjs()), **values)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error
