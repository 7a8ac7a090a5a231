"""How much of a network's work is done, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from carlreg.geometry.resizing import resize
from carlreg.model.algorithms import RegistrationAlgorithm

SMALLER = 4
"""A first run on images with so many times fewer voxels a side counts the convolutions: 1/64 of the work, in 3-D."""
Report = Callable[[float], None]


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
    shape = [max(n // SMALLER, 8) for n in fixed.shape[2:]]
    small = [resize(image, shape) for image in (moving, fixed)]
    work = 0.0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal work
        work += _multiplications(layer, inputs[0], output)

    with torch.no_grad(), _hooks(network, count):
        network.both(*small)
    expected, work = work * fixed[0, 0].numel() / small[1][0, 0].numel(), 0.0

    def advance(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        count(layer, inputs, output)
        report(min(work / max(expected, 1.0), 1.0))

    with _hooks(network, advance):
        yield


def _multiplications(layer: nn.Module, inputs: Tensor, output: Tensor) -> float:
    """Those of a convolution: each number of the smaller side meets every weight of its channel."""
    assert isinstance(layer.weight, Tensor)
    few = inputs if layer.transposed else output
    return layer.weight.numel() * (few.numel() / few.shape[1])


@contextlib.contextmanager
def _hooks(network: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    layers = [layer for layer in network.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
