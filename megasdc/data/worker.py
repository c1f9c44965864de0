"""Worker process that tokenizes shards: ``python -m megasdc.data.worker KIND TOKENIZER_FOLDER``.

Requests and replies are length-prefixed pickles on standard input and output; both ends are this package. The process
ends when its input does, so that no worker outlives a killed parent. Imports no torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any

from megasdc.common.errors import DataError
from megasdc.data.shards import write_shard
from megasdc.data.tokenizer import load_tokenizer

_LENGTH = struct.Struct("<Q")


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message."""
    content = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message; EOFError if the other end closed the stream, also in the middle of a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other process has ended")
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError("the other process ended in the middle of a message")
    return pickle.loads(content)


def main() -> None:
    """Serve requests ``(shard path, texts, beginning)`` until the input ends; reply ``None`` or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals the whole process group; the parent ends the workers
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break the protocol
    # transformers 5 imports torch if it is installed, whatever USE_TORCH is; None here hides it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    kind, folder = sys.argv[1:]
    tokenizer = None
    while True:
        try:
            path, texts, beginning = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tokenizer = tokenizer or load_tokenizer(kind, folder)
            write_shard(Path(path), tokenizer, texts, beginning)
            send(replies, None)
        except (DataError, OSError) as error:
            send(replies, error)


if __name__ == "__main__":
    main()
