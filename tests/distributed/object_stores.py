"""A server of S3's protocol in a process of its own: moto, and one that refuses everybody."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "checkpoints"
_REFUSAL = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist</Message></Error>'
)


def _variables(port: int) -> dict[str, str]:
    """What a client needs, in the environment alone."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start moto's server with one empty bucket; yields the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = _variables(port)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the server of S3 did not start"
                time.sleep(0.2)
        yield variables
    finally:
        server.kill()
        server.wait()


@contextmanager
def refusing_server() -> Iterator[dict[str, str]]:
    """A server that answers every request as S3 answers a key that it does not know."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(403)
            self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(_REFUSAL)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(_REFUSAL)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _refuse

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield _variables(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
