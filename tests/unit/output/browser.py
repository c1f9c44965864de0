"""A real browser for pages: headless Chromium, spoken to over a pipe in the DevTools protocol; no network.

Source: the protocol, https://chromedevtools.github.io/devtools-protocol/; ``--remote-debugging-pipe`` reads file
descriptor 3 and writes 4, messages end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


_COVERED_AXES = """
[...document.querySelectorAll('.figure')].filter(figure => {
  const legend = figure.querySelector('.legend .bg');
  if (!legend) return false;
  const axis = [...figure.querySelectorAll('.xtick, .xtitle')].map(one => one.getBoundingClientRect().bottom);
  const { top, bottom } = legend.getBoundingClientRect();
  return top < Math.max(...axis) - 2 || bottom > figure.getBoundingClientRect().bottom + 1;
}).map(figure => figure.id)
"""


class Browser:
    """One browser with one page; leaves nothing behind.

    Attributes:
        errors: warnings and errors of the console, exceptions that no script caught, and requests to the network.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._number = 0
        self._profile = tempfile.mkdtemp(prefix="megasdc_browser_")
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        child = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--disable-background-networking"]
        self._process = subprocess.Popen(
            ["bash", "-c", child, str(CHROMIUM), *options, "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._rest, self._session = b"", None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask for something and wait for the answer; events on the way are looked at."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, page: Path, width: int = 1200, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Show a page and wait until its scripts have run."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def covered_axes(self) -> list[str]:
        """Figures whose legend lies over their horizontal axis, or goes on below their end."""
        found: list[str] = self.run(_COVERED_AXES)
        return found

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print_pdf(self) -> bytes:
        """What would be printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.errors.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(found["entry"]))
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.errors.append(f"asks the network for {found['request']['url']}")


def choose(browser: Browser, label: str, value: str) -> None:
    """Choose what figures show, as a reader does, by the label of the choice."""
    browser.run(
        f"(() => {{ const control = document.querySelector(`[data-choice={json.dumps(label)}]`);"
        f"control.value = {json.dumps(value)}; control.dispatchEvent(new Event('change')); }})()"
    )
