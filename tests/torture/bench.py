"""A small pair, a tiny model and the commands that faults are injected into, in one temporary folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SIDE = 32
LIMIT = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a child process came to."""

    code: int
    """Its exit code; minus the number of the signal that ended it."""
    stderr: str

    @property
    def killed(self) -> bool:
        return self.code == -9


def in_child(action: Callable[[], int]) -> Outcome:
    """Run an action in a fork of this process, which has everything imported already."""
    log = tempfile.NamedTemporaryFile("r+", errors="replace")  # noqa: SIM115
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(log.fileno(), 2)
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    log.seek(0)
    with log:
        return Outcome(os.waitstatus_to_exitcode(status), log.read())


def carl(*words: object) -> int:
    """The command line, in this process."""
    from carlreg.cli import main

    return main([str(word) for word in words])


@functools.cache
def scene() -> Path:
    """A folder with two moving images, a fixed one, a label map and a model; made once."""
    import carlreg
    from carlreg.files.images import from_array, write

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="torture.", dir=os.environ.get("TORTURE_TMP")))
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, SIDE)] * 3, indexing="ij"))
    for name, centre in (("fixed", (0.0, 0.1, 0.0)), ("moving", (0.2, 0.0, -0.1)), ("other", (-0.2, 0.1, 0.2))):
        distance = np.sqrt(((grid - np.reshape(centre, (3, 1, 1, 1))) ** 2).sum(0))
        image = (200 * np.exp(-4 * distance**2) * (1 + 0.3 * np.sin(9 * grid[0]))).astype(np.uint8)
        write(from_array(image), folder / f"{name}.nii.gz")
    torch.manual_seed(0)
    network = carlreg.carl(3, 2, width=4, unet_down=(2, 2, 2, 2, 2), unet_up=(2, 2, 2, 2, 2))
    carlreg.save(network, folder / "tiny.safetensors", metadata={"grid": " ".join([str(SIDE)] * 3)})
    images = folder / "images"
    images.mkdir()
    for name in ("fixed", "moving", "other"):
        shutil.copy(folder / f"{name}.nii.gz", images)
    return folder


def register(out: Path, moving: str = "moving", *more: object) -> list[object]:
    base = scene()
    words = ["register", "-f", base / "fixed.nii.gz", "-m", base / f"{moving}.nii.gz", "-o", out]
    return [*words, "--model", base / "tiny.safetensors", "--io-iterations", "0", "--device", "cpu", "--no-html", *more]


def fingerprint(path: Path) -> str:
    """What a file holds: voxels of an image, points of a transform, weights of a model, bytes of anything else."""
    from carlreg.files import images, transform_files

    if path.name.endswith("warp.nii.gz") or path.suffix == ".h5":
        transform = transform_files.read(path)
        points = np.random.default_rng(0).uniform(0, SIDE - 1, (50, 3))
        return hashlib.sha256(np.round(transform(points), 3).tobytes()).hexdigest()
    if path.name.endswith(".nii.gz"):
        image = images.read(path)
        return hashlib.sha256(image.data.tobytes() + image.affine.tobytes()).hexdigest()
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        tensors = sorted(load_file(path).items())
        return hashlib.sha256(b"".join(name.encode() + tensor.tobytes() for name, tensor in tensors)).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Fingerprints of a result folder's data files."""
    names = ("warped.nii.gz", "transform.h5", "inverse_transform.h5", "warp.nii.gz")
    return {name: fingerprint(folder / name) for name in names if (folder / name).is_file()}


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    scene()
    folder = Path(tempfile.mkdtemp(prefix="torture.", dir=os.environ.get("TORTURE_TMP")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def expected(moving: str) -> dict[str, str]:
    """The contents of an undisturbed result."""
    with workplace() as folder:
        outcome = in_child(lambda: carl(*register(folder / "out", moving)))
        assert outcome.code == 0, outcome.stderr
        return contents(folder / "out")
