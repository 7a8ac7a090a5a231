"""Shared fixtures: small networks with random last convolutions, textures, and shifts by whole voxels."""

from __future__ import annotations

import csv
import locale
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # read when torch is imported: processes share the cores between them
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: kernels run on the CPU, step by step

from browser import WEBGL, Page, chromium
from torch import Tensor, nn

from carlreg.files.tables import COLUMNS, Pair
from carlreg.model.unet import UNet

Model = TypeVar("Model", bound=nn.Module)
Run = Callable[..., tuple[int, str]]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SMALL = {"unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)}
"""U-Nets as deep as the paper's, so with the same strides and reach, but narrow."""
LOCALE = locale.setlocale(locale.LC_ALL)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _locale() -> None:
    """Undo what SimpleITK does when a test writes DICOM: it sets the locale of the process to "C"."""
    locale.setlocale(locale.LC_ALL, LOCALE)


@pytest.fixture(scope="session")
def tab() -> Iterator[Page]:
    """One browser for all tests that can share it. `open` forgets the requests and complaints of the page before."""
    with chromium(*WEBGL) as page:
        yield page


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command: its exit code, and what it printed to stderr."""
    from carlreg.cli import main

    def call(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        return main([str(word) for word in words]), capsys.readouterr().err

    return call


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only test files that have such tests: they need torch, triton and pytest alone."""
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def randomize(model: Model, *inputs: Tensor, move: float = 4.0) -> Model:
    """Random weights that behave like trained ones on these inputs (a pair of images, or what a network takes).

    BatchNorm gets the statistics of the inputs, so that features are centred and differ from voxel to voxel; each
    refinement gets a random last convolution (it starts at zero), scaled to move points by `move` voxels on average.
    """

    def scale_last(unet: UNet, _: object, output: Tensor) -> Tensor:
        factor = move / displacement_in_voxels(output)
        unet.last.weight.data *= factor
        unet.last.bias.data *= factor
        return output * factor

    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    unets = [module for module in model.modules() if isinstance(module, UNet)]
    for unet in unets:
        nn.init.normal_(unet.last.weight)
        nn.init.normal_(unet.last.bias)
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
        model.train()(*inputs)
        for norm in norms:
            norm.momentum = 0.1
        hooks = [unet.register_forward_hook(scale_last) for unet in unets]
        model.eval()(*inputs)
        for hook in hooks:
            hook.remove()
    return model.requires_grad_(False)


def displacement_in_voxels(displacement: Tensor) -> float:
    """Root mean square length of a displacement (B, D, *shape), in voxels."""
    return float(voxels(displacement.movedim(1, -1), displacement.shape[2:]).square().sum(-1).mean().sqrt())


def texture(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random values, no two neighbourhoods alike: (1, 1, *shape)."""
    return torch.rand(1, 1, *shape, dtype=dtype)


def paste(patch: Tensor, canvas: tuple[int, ...], at: tuple[int, ...]) -> Tensor:
    """The patch on a blank canvas, its first voxel at index `at`."""
    image = torch.zeros(*patch.shape[:2], *canvas, dtype=patch.dtype)
    window = (slice(None), slice(None), *(slice(a, a + n) for a, n in zip(at, patch.shape[2:], strict=True)))
    image[window] = patch
    return image


def voxels(points: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Unit coordinates, or differences of them, in voxels of an image with these sides."""
    return points * torch.tensor([max(n - 1, 1) for n in shape]).to(points)


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write pairs as a CSV file, with absolute paths."""

    def text(value: str | Path | tuple[Path, ...] | None) -> str:
        if isinstance(value, tuple):
            return ";".join(text(one) for one in value)
        return str(value.resolve()) if isinstance(value, Path) else value or ""

    columns = [name for name in COLUMNS if any(getattr(pair, name) for pair in pairs)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *([text(getattr(pair, name)) for name in columns] for pair in pairs)])
