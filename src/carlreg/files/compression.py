"""Compression by several threads at once: zlib works outside Python's lock."""

import itertools
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, TypeVar

import torch

LEVEL = 1  # for fields and scans, higher levels take twice as long or more and save less than a tenth
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map(function, items)`, by as many threads as torch uses, a few items ahead."""
    count = torch.get_num_threads()
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > 2 * count:
                yield running.popleft().result()
        yield from (one.result() for one in running)


def write_gzip(file: IO[bytes], blocks: Iterable[Any]) -> None:
    """Write one gzip stream. Blocks, bytes of a megabyte or more, are compressed on their own. The stream has neither
    name nor time, so that equal contents are equal files."""
    checksum, length = 0, 0

    def seen() -> Iterator[Any]:
        nonlocal checksum, length
        for block in blocks:
            checksum, length = zlib.crc32(block, checksum), length + len(block)
            yield block

    def pack(block: Any) -> bytes:
        packer = zlib.compressobj(LEVEL, wbits=-15)
        return packer.compress(block) + packer.flush(zlib.Z_SYNC_FLUSH)  # which ends at a whole byte

    end = zlib.compressobj(LEVEL, wbits=-15).flush()
    for part in itertools.chain([b"\x1f\x8b\x08\0\0\0\0\0\0\xff"], in_threads(pack, seen()), [end]):
        file.write(part)
    file.write(struct.pack("<2I", checksum, length % 2**32))
