"""Both maps of a network, on a GPU as a CUDA graph where pairs of the same shape follow."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from carlreg.fast.devices import on_device
from carlreg.fast.graphs import Graphs
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import Augmented, RegistrationAlgorithm

Maps = tuple[Transform, Transform]


def both_maps(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, graphs: Graphs | None = None) -> Maps:
    """Φ[moving, fixed] and Φ[fixed, moving], without gradients and in half precision where the GPU has it.

    With `graphs`, the network is captured when images of these shapes come a second time.
    """
    key = _key(network, moving) if moving.shape == fixed.shape and _is_known(network) else None
    if graphs is None or key is None or not graphs.is_repeated(key):
        return _both(network, moving, fixed)
    check_pair(moving, fixed)
    images = torch.cat([moving, fixed])
    check_finite(images, "the pair")
    with on_device(images), graphs.lend(key, lambda: _Forward(network, images)) as (forward, repeat):
        forward.images.copy_(images)
        repeat()
        return tuple(phi.map_tensors(torch.clone) for phi in forward.maps)  # type: ignore[return-value]


class _Forward:
    """A network's maps between images (2 B, C, *shape) that stay where they are."""

    def __init__(self, network: RegistrationAlgorithm, images: Tensor) -> None:
        self.network, self.images = network, images.clone()
        self.maps: Maps

    def run(self) -> None:
        self.maps = _both(self.network, *self.images.chunk(2))


def _both(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Maps:
    with torch.no_grad(), mixed_precision(fixed.device):  # left again in a capture: autocast keeps weights it converts
        return network.both(moving, fixed)


def _key(network: RegistrationAlgorithm, image: Tensor) -> Hashable:
    """What a captured network depends on: also on where its weights are, which moving it to a device changes."""
    weights = tuple(one.data_ptr() for one in (*network.parameters(), *network.buffers()))
    return "network", id(network), weights, image.shape, image.dtype, image.device


def _is_known(network: RegistrationAlgorithm) -> bool:
    """Whether a network has parts of this package alone, none of them random: a user's may wait for the GPU."""
    parts = list(network.modules())
    own = all(type(part).__module__.partition(".")[0] in ("carlreg", "torch") for part in parts)
    return own and not any(isinstance(part, Augmented) for part in parts)
