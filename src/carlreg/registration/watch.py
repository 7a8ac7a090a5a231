"""How much of a network's work is done, while it runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from carlreg.geometry.resizing import resize
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm

THIN = 8
"""Voxels across the images by which the work is counted beforehand."""
Report = Callable[[float], None]
Note = Callable[[float, list[int]], None]
"""Takes the multiplications of a convolution, or of an attention that follows, at one place of its grid, and the sides
of that grid."""


@contextlib.contextmanager
def watched(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, report: Report | None) -> Iterator[None]:
    """Call `report` with the share of the network's multiplications that are done, from 0 to 1, while it computes both
    maps between two images (B, 1, *shape) inside the block.

    >>> with watched(network, moving, fixed, print):
    ...     network.both(moving, fixed)
    """
    if report is None or fixed.is_cuda:  # on a GPU, it is done before anyone looks
        yield
        return
    expected, done, begun = _expected(network, moving, fixed), 0.0, 0.0
    report(0.0)

    def advance(convolution: float, sides: list[int]) -> None:
        nonlocal done, begun
        done, begun = done + begun + convolution * math.prod(sides), 0.0
        report(min(done / expected, 1.0))

    def attend(each: float, sides: list[int]) -> None:
        nonlocal begun
        begun = each * math.prod(sides)

    with _hooks(network, advance, attend):
        yield


@torch.no_grad()
def _expected(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> float:
    """The multiplications of a network, from the sides of its features for images that are thin along all axes but one.
    Networks treat their axes alike, so one run for each length will do."""
    shape = fixed.shape[2:]
    runs: dict[int, list[tuple[float, int]]] = {}
    for axis, length in enumerate(shape):
        if length not in runs:
            thin = [length if other == axis else min(THIN, n) for other, n in enumerate(shape)]
            runs[length] = _sides(network, resize(moving, thin), resize(fixed, thin), axis)
    steps = zip(*(runs[length] for length in shape), strict=True)
    return max(sum(step[0][0] * math.prod(side for _, side in step) for step in steps), 1.0)


def _sides(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, axis: int) -> list[tuple[float, int]]:
    """The multiplications of each step at one place, and the side of its grid along an axis."""
    found: list[tuple[float, int]] = []

    def note(each: float, sides: list[int]) -> None:
        found.append((each, sides[axis]))

    with _hooks(network, note, note):
        network.both(moving, fixed)
    return found


@contextlib.contextmanager
def _hooks(network: nn.Module, convolution: Note, attention: Note) -> Iterator[None]:
    """Call one function after each convolution, and the other after the encoder of each attention."""

    def convolved(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        few = inputs[0] if layer.transposed else output  # of which each number meets every weight of its channel
        convolution(layer.weight.numel() * len(few), list(few.shape[2:]))

    handles = []
    for module in network.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            handles.append(module.register_forward_hook(convolved))
        if isinstance(module, CoordinateAttention):

            def encoded(_: nn.Module, __: object, output: Tensor, padding: int = module.padding) -> None:
                attention(len(output) * output.shape[1], [n * (n - 2 * padding) for n in output.shape[2:]])

            handles.append(module.encoder.register_forward_hook(encoded))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
