"""Digests of a file, of its tensors and of their blocks; each byte is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import xxhash

from megasdc.checkpoint.formats.content import BLOCK_BYTES, Content, TensorContent
from megasdc.checkpoint.formats.file_structure import Span, Structure, read_structure
from megasdc.common.errors import CheckpointError

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """The digests of one file, its tensors and their blocks; ``problem``: why it cannot be parsed, None if it can."""

    size_bytes: int
    xxh3_128: str
    content: Content
    problem: str | None


def digest_file(
    path: Path, *, block_bytes: int = BLOCK_BYTES, progress: Callable[[int], None] | None = None
) -> FileDigest:
    """Read a file once, from its first byte to its last; CheckpointError if it became shorter meanwhile."""
    structure = read_structure(path)
    size = path.stat().st_size
    spans = sorted({(span.offset, span.offset + span.size_bytes) for span in structure.spans if span.size_bytes})
    blocks: dict[tuple[int, int], str] = dict.fromkeys(spans, "")
    states: dict[tuple[int, int], xxhash.xxh3_128] = {}
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        for place, end, inside in _segments(spans, size, block_bytes):
            wanting = [whole, *(states.setdefault(span, xxhash.xxh3_128()) for span in inside)]
            left = end - place
            while left:
                got = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not got:
                    raise CheckpointError(f"{path} got shorter while it was read, it had {size} bytes: read it again")
                for state in wanting:
                    state.update(buffer[:got])
                left -= got
                if progress is not None:
                    progress(got)
            for start, stop in inside:
                if (end - start) % block_bytes == 0 or end == stop:
                    blocks[start, stop] += states.pop((start, stop)).hexdigest()
    return FileDigest(size, whole.hexdigest(), _content(structure, blocks, block_bytes), structure.problem)


def _segments(
    spans: list[tuple[int, int]], size: int, block_bytes: int
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut a file where a tensor or block begins or ends; yields each segment's ends and the tensors that contain it."""
    cuts = {0, size}.union(*(range(start, stop, block_bytes) for start, stop in spans), (stop for _, stop in spans))
    waiting, inside = spans[::-1], list[tuple[int, int]]()
    for place, end in pairwise(sorted(cuts)):
        inside = [span for span in inside if span[1] > place]
        while waiting and waiting[-1][0] <= place:
            inside.append(waiting.pop())
        yield place, end, inside


def _content(structure: Structure, blocks: dict[tuple[int, int], str], block_bytes: int) -> Content:
    def tensor(span: Span) -> TensorContent:
        return TensorContent(**vars(span), blocks=blocks.get((span.offset, span.offset + span.size_bytes), ""))

    tensors = [tensor(span) for span in structure.spans]
    return Content(
        block_bytes=block_bytes,
        tensors=tensors,
        values=structure.values,
        rest=structure.rest,
        fragments=structure.fragments,
    )
