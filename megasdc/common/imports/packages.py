"""Whether a package is installed, without importing it."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package is installed; a mere folder of that name, as trackers create in the working folder, is not."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
