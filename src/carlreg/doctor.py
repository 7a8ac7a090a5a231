"""`carl doctor`: whether this installation works, on this machine, and what to do if it does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import carlreg
from carlreg import fast
from carlreg.fast.devices import available_memory
from carlreg.files import images, transform_files, world_transform
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, from_array
from carlreg.files.itk import simpleitk
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.grids import Grid
from carlreg.geometry.transforms import DisplacementField
from carlreg.model.attention import coordinate_attention
from carlreg.model.shipped import WEIGHTS, available
from carlreg.objective.losses import lncc

State = Literal["green", "note", "red"]
PACKAGES = {
    **{"torch": (2, 4), "numpy": (1, 26), "safetensors": (0, 4), "SimpleITK": (2, 3), "h5py": (3, 8)},
    **{"pillow": (10, 0), "jinja2": (3, 1), "typer": (0, 19), "rich": (13, 0)},
}
"""What the package needs, and from which version on."""
SPACE, MEMORY = 1e9, 4e9
"""Bytes on a disk, and of memory, below which a registration may fail."""
CLOSE = 5e-3
"""Kernels and the plain expressions differ by less than this, relative to the largest value: they round differently."""
MM = 0.02
"""Other tools place points and voxels as near as this to where we do."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    text: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """All checks, in order. A check that fails in an unexpected way is red, too."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            yield Finding(name, "red", f"the check failed: {text}", "please report it with this line")


def versions() -> Iterator[Finding]:
    for name, least in PACKAGES.items():
        try:
            importlib.import_module({"pillow": "PIL"}.get(name, name))
            found = importlib.metadata.version(name)
        except ImportError as error:
            yield Finding(name, "red", f"cannot be imported: {error}", f"pip install {name}")
            continue
        wanted = ".".join(map(str, least))
        old = tuple(int(part) for part in found.split(".")[:2]) < least
        if old:
            yield Finding(name, "red", f"{found}; {wanted} or later is needed", f"pip install --upgrade {name}")
        else:
            yield Finding(name, "green", found)
    yield Finding("carlreg", "green", f"{carlreg.__version__}, Python {platform.python_version()}")


def gpu() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gigabytes = torch.cuda.get_device_properties(number).total_memory / 2**30
            yield Finding("GPU", "green", f"{torch.cuda.get_device_name(number)}, {gigabytes:.0f} GiB")
        return
    if shutil.which("nvidia-smi") is not None:
        advice = "install the build of PyTorch for your CUDA version: see docs/install.md"
        yield Finding("GPU", "red", f"there is an NVIDIA driver, but PyTorch {torch.__version__} finds no GPU", advice)
    else:
        yield Finding("GPU", "note", "none: everything runs on the CPU, in minutes instead of seconds")


def kernels() -> Iterator[Finding]:
    """Every operation that has a kernel of its own, on the GPU and as a plain expression on the CPU."""
    if not torch.cuda.is_available():
        yield Finding("kernels", "note", "not needed without a GPU")
        return
    if (reason := fast.why_not(0)) is not None:
        yield Finding("kernels", "note", f"not used: {reason}; PyTorch's own operations are slower")
        return
    yield from compare(torch.device("cuda"))


def compare(device: torch.device) -> Iterator[Finding]:
    """Each operation on a device, compared with the CPU."""
    for name, operation in OPERATIONS.items():
        expected = operation(torch.device("cpu"))
        try:
            found = operation(device).cpu()
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            yield Finding(f"kernel: {name}", "red", f"does not run: {text}", ADVICE)
            continue
        apart = float((found - expected).abs().amax() / expected.abs().amax())
        wrong = not apart < CLOSE
        text = f"{apart:.1e} from the plain expression"
        yield Finding(f"kernel: {name}", "red" if wrong else "green", text, ADVICE if wrong else "")


ADVICE = "update PyTorch and Triton, or register with --device cpu"


def _random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _sampling(device: torch.device) -> Tensor:
    field = DisplacementField(0.1 * (_random(1, 3, 16, 16, 16).to(device) - 0.5), "mirror")
    return field(1.4 * _random(1, 500, 3).to(device) - 0.2)


def _correlation(device: torch.device) -> Tensor:
    return lncc(*_random(2, 1, 1, 24, 24, 24).to(device)).reshape(1)


def _attention(device: torch.device) -> Tensor:
    queries, keys = (0.5 * _random(2, 1, 512, 32)).bfloat16().to(device)  # logits up to 8; rounded before the product
    if device.type == "cpu":
        queries, keys = queries.float(), keys.float()
    return coordinate_attention(queries, keys, Grid.of((8, 8, 8)), bound=16.0)


OPERATIONS: dict[str, Callable[[torch.device], Tensor]] = {
    "sampling": _sampling,
    "local correlation": _correlation,
    "attention": _attention,
}


def models() -> Iterator[Finding]:
    lines = (WEIGHTS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, name in (line.split() for line in lines if line.strip())}
    for name in available():
        right = sha256(WEIGHTS / f"{name}.safetensors") == expected.get(f"{name}.safetensors")
        text = "its checksum is the published one" if right else "its checksum is not the published one"
        yield Finding(f"model {name}", "green" if right else "red", text, "" if right else "reinstall the package")
    if not available():
        yield Finding("models", "red", "none in the package", "reinstall the package")


def small_pair() -> tuple[Image, Image, WorldTransform]:
    """Two small images on oblique grids, and a map between their worlds that bends."""
    turn = np.array([[0.96, -0.28, 0.0], [0.28, 0.96, 0.0], [0.0, 0.0, 1.0]])
    affine, other = np.eye(4), np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn * [1.5, 1.2, 2.0], (-30, 12, 40)
    other[:3, :3], other[:3, 3] = np.diag([-1.4, 1.6, 2.2]), (20, -15, 38)
    axes = np.meshgrid(*(np.linspace(0, 3, n) for n in (20, 22, 18)), indexing="ij")
    wave = np.sum([np.sin(2 * one + n) for n, one in enumerate(axes)], axis=0)
    fixed, moving = (from_array((100 * wave + 300).astype(np.float32), one) for one in (affine, other))
    field = np.stack([2 * np.sin(one) for one in axes], axis=-1).astype(np.float32)
    linear = moving.unit_to_world() @ fixed.world_to_unit()
    return fixed, moving, WorldTransform(linear, field, fixed.index_to_world())


def itk() -> Iterator[Finding]:
    """Write an image and a transform, and let SimpleITK warp with them."""
    sitk = simpleitk()
    fixed, moving, transform = small_pair()
    expected = world_transform.apply(transform, moving, fixed).data
    with tempfile.TemporaryDirectory(prefix="carl-doctor-") as name:
        folder = Path(name)
        for side, image in (("fixed", fixed), ("moving", moving)):
            images.write(image, folder / f"{side}.nii.gz")
            again = images.read(folder / f"{side}.nii.gz")
            if not np.array_equal(again.data, image.data) or np.abs(again.affine - image.affine).max() > MM:
                yield Finding("files", "red", "an image is not read back as it was written", "please report it")
        transform_files.write(transform, folder / "transform.h5")
        theirs = sitk.ReadTransform(str(folder / "transform.h5"))
        there, here = (sitk.ReadImage(str(folder / f"{side}.nii.gz")) for side in ("moving", "fixed"))
        warped = sitk.GetArrayFromImage(sitk.Resample(there, here, theirs, sitk.sitkLinear, 0.0)).T
        yield _agreement("ITK", warped, expected)
        yield from _ants(folder, expected)


def _ants(folder: Path, expected: Any) -> Iterator[Finding]:
    try:
        ants = importlib.import_module("ants")
    except ImportError:
        yield Finding("ANTs", "note", "not installed, and not needed")
        return
    here, there = (ants.image_read(str(folder / f"{side}.nii.gz")) for side in ("fixed", "moving"))
    warped = ants.apply_transforms(here, there, [str(folder / "transform.h5")], interpolator="linear")
    yield _agreement("ANTs", warped.numpy(), expected)


def _agreement(tool: str, warped: Any, expected: Any) -> Finding:
    """Compare where both have a value: at the border of an image they differ in what is outside."""
    both = (warped != 0) & (expected != 0)
    error = float(np.abs(warped - expected)[both].max()) if both.any() else float("inf")
    text = f"warps a small pair as we do, to {error:.2g} of 600 grey levels"
    if both.mean() < 0.3 or not error < 1:
        return Finding(tool, "red", "warps a small pair differently from us", "please report it with your versions")
    return Finding(tool, "green", text)


def space() -> Iterator[Finding]:
    for what, folder in (("this folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        if not os.access(folder, os.W_OK):
            yield Finding(f"disk, {what}", "red", f"{folder} is not writable", "choose another folder for results")
            continue
        free = shutil.disk_usage(folder).free
        little = free < SPACE
        advice = "free some space: a result may need a gigabyte" if little else ""
        yield Finding(f"disk, {what}", "red" if little else "green", f"{free / 1e9:.0f} GB free in {folder}", advice)
    memory = available_memory(torch.device("cpu"))
    little = memory < MEMORY
    advice = "close other programs, or use a machine with more memory" if little else ""
    yield Finding("memory", "red" if little else "green", f"{memory / 1e9:.0f} GB available", advice)


def threads() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = torch.get_num_threads()
    if used < cores // 2:
        variable = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "a limit of PyTorch"
        advice = f"raise or unset {variable}" if "OMP" in variable else "give --threads to use more"
        yield Finding("threads", "note", f"{used} of {cores} cores are used, because of {variable}", advice)
    else:
        yield Finding("threads", "green", f"{used} for {cores} core{'s' if cores != 1 else ''}")


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": versions,
    "GPU": gpu,
    "kernels": kernels,
    "models": models,
    "ITK": itk,
    "disk": space,
    "threads": threads,
}
