"""The scans that `collect` reads, in archives small enough to send to another machine."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import math
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.confidence.cases import Scan, scans

GZ = ".gz"


def pack(data: Path, out: Path, most_mib: float = math.inf) -> list[Path]:
    """Write archives of at most this size, scans-1.tar and so on, each subject into the first that has room for it. The
    first ones have some subjects of most sets."""
    parts: list[list[tuple[str, bytes]]] = []
    for unit in units(data):
        files = [(name, _compressed(data / name)) for scan in unit for name in scan.files()]
        room = (part for part in parts if _size([*part, *files]) <= most_mib * 2**20)
        part = next(room, None)
        if part is None:
            parts.append(part := [])
        part += files
        if _size(part) > most_mib * 2**20:
            raise SystemExit(
                f"{unit[0].stem} takes {_size(files) / 2**20:.1f} MiB; expected --most-mib to allow for that"
            )
    out.mkdir(parents=True, exist_ok=True)
    return [_write(out / f"scans-{number}.tar", files) for number, files in enumerate(parts, start=1)]


def _size(files: Sequence[tuple[str, bytes]]) -> int:
    """Of an archive, at most: members begin at multiples of 512 bytes, and archives end at multiples of 10240."""
    return sum(len(content) + 1024 for _, content in files) + 2 * 10240


def units(data: Path) -> Iterator[list[Scan]]:
    """Scans that belong together, of one subject or of one pair of lungs, alternating between sets and splits."""
    found = scans(data)
    subjects = [
        [list(each) for _, each in itertools.groupby(one, key=lambda scan: scan.subject)]
        for (name, _), one in found.items()
        if name != "lung"
    ]
    lungs = [one for (name, _), one in found.items() if name == "lung" and one]
    for number, turn in enumerate(itertools.zip_longest(*subjects)):
        if number == 2:
            yield from lungs
        yield from (one for one in turn if one is not None)
    if max(map(len, subjects), default=0) <= 2:
        yield from lungs


def unpack(archives: Sequence[Path], data: Path) -> None:
    """Write the files again; what they contain is the same, but they are compressed less."""
    for archive in archives:
        with tarfile.open(archive) as files:
            for member in files:
                content = files.extractfile(member)
                assert content is not None
                voxels = bz2.decompress(content.read())
                target = data / member.name.removesuffix(".bz2")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(gzip.compress(voxels, 1) if target.suffix == GZ else voxels)


def _compressed(path: Path) -> bytes:
    content = path.read_bytes()
    return bz2.compress(gzip.decompress(content) if path.suffix == GZ else content)


def _write(path: Path, files: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(f"{name}.bz2")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {len(files)} files")
    return path
