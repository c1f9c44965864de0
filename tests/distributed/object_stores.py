"""Object stores in processes of their own, each with an empty bucket or container: moto's server for S3, an emulator of
Google Cloud Storage, Azurite for Azure; and servers that refuse everybody.
"""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import fsspec
import pytest

from megasdc.parallel.local_ranks import free_port

BUCKET = "checkpoints"
_ON = "127.0.0.1"
_S3_REFUSAL = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist</Message></Error>'
)
_GCS_REFUSAL = b'{"error": {"code": %d, "message": "x@y does not have storage.objects.get access"}}'
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which is public."""
_GCS_SERVER = """
import json
from gcp_storage_emulator import __main__ as emulator, server

read_any = server._read_data


def read_exactly(handler, query):
    kind = handler.headers.get("Content-Type") or ""
    if not kind.startswith("multipart/related"):
        return read_any(handler, query)
    raw = server._decode_raw_data(server._read_raw_data(handler), handler)
    boundary = b"\\n--" + kind.partition("boundary=")[2].strip('"').encode()
    _, meta, rest = (b"\\n" + raw).split(boundary, 2)
    head, _, content = rest[: rest.rindex(boundary)].partition(b"\\n\\n")
    content_type = head.partition(b":")[2].strip().decode()
    return {"meta": json.loads(meta.partition(b"\\n\\n")[2]), "content": content, "content-type": content_type}


server._read_data = read_exactly
emulator.main()
"""
"""The emulator of Google Cloud Storage, but for its reading of uploads in two parts: it takes them for mail (version
2026.7.19), and of content that ends with a carriage return it drops that byte, one object of 256."""


@dataclass(frozen=True)
class ObjectStore:
    """A store that runs.

    Attributes:
        scheme: of its addresses.
        variables: environment of its clients.
        secret: in that environment; empty: its clients need none.
        refused: changes of the environment with which it, or a server in its place, refuses a client.
    """

    scheme: str
    variables: dict[str, str]
    secret: str = ""
    refused: list[dict[str, str]] = field(default_factory=list)

    def address(self, name: str, bucket: str = BUCKET) -> str:
        """Address of an archive."""
        return f"{self.scheme}://{bucket}/{name}"


@contextmanager
def s3_store() -> Iterator[ObjectStore]:
    """S3's protocol: moto."""
    variables = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", _ON, "-p", str(port)]

    with _server(command, variables) as port, _refusing(403, _S3_REFUSAL) as refusing:
        request = urllib.request.Request(f"http://{_ON}:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        variables["AWS_ENDPOINT_URL"] = f"http://{_ON}:{port}"
        yield ObjectStore("s3", variables, "s3cr3t", [{"AWS_ENDPOINT_URL": refusing}])


@contextmanager
def gcs_store() -> Iterator[ObjectStore]:
    """Google Cloud Storage: an emulator, whose clients need no credentials."""

    def command(port: int) -> list[str]:
        program = [sys.executable, "-c", _GCS_SERVER, "start", "--in-memory", "--quiet"]
        return [*program, "--host", _ON, "--port", str(port), "--default-bucket", BUCKET]

    unknown, forbidden = (_refusing(status, _GCS_REFUSAL % status) for status in (401, 403))
    with _server(command, {}) as port, unknown as first, forbidden as second:
        refused = [{"STORAGE_EMULATOR_HOST": address} for address in (first, second)]
        yield ObjectStore("gs", {"STORAGE_EMULATOR_HOST": f"http://{_ON}:{port}"}, refused=refused)


@contextmanager
def azure_store() -> Iterator[ObjectStore]:
    """Azure Blob Storage: Azurite, which checks the signatures of its clients."""
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite-blob is not on PATH: npm install --global azurite (it needs Node.js: apt install npm)")

    def command(port: int) -> list[str]:
        program = ["azurite-blob", "--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"]
        return [*program, "--blobHost", _ON, "--blobPort", str(port)]

    def variables(key: str) -> dict[str, str]:
        place = f"BlobEndpoint=http://{_ON}:{port}/devstoreaccount1"
        text = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};{place}"
        return {"AZURE_STORAGE_CONNECTION_STRING": text}

    with _server(command, {}) as port:
        right, wrong = variables(_AZURE_KEY), variables(_AZURE_KEY.replace("Eby8", "s3cr"))
        fsspec.filesystem("abfs", connection_string=right["AZURE_STORAGE_CONNECTION_STRING"]).mkdir(BUCKET)
        none, malformed = ({"AZURE_STORAGE_CONNECTION_STRING": text} for text in ("", "AccountKey=s3cr"))
        yield ObjectStore("abfs", right, _AZURE_KEY[4:], [wrong, none, malformed])


STORES = {"s3": s3_store, "gcs": gcs_store, "azure": azure_store}


@contextmanager
def _server(command: Callable[[int], list[str]], variables: dict[str, str]) -> Iterator[int]:
    """Start a program that listens on a free port; yields the port when it does."""
    port = free_port()
    server = subprocess.Popen(
        command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **variables}
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((_ON, port), timeout=10).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, f"{server.args} did not start"
                time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


@contextmanager
def _refusing(status: int, answer: bytes) -> Iterator[str]:
    """A server that answers every request as a store answers a client that it refuses; yields its address."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _refuse

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((_ON, 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{_ON}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
