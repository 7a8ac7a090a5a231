"""Write icon.npz: what the authors' implementation computes from the weights, images and fields of rule.py.

Runs only where icon_registration 1.1.9 is installed, beside torch and numpy:

    python tests/reference/make_reference.py
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import rule
import torch

VERSION = "1.1.9"
OUTPUT = Path(__file__).with_name("icon.npz")


def import_icon() -> tuple[types.ModuleType, types.ModuleType]:
    try:
        found = importlib.metadata.version("icon_registration")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        sys.exit(f"found icon_registration {found}; the reference arrays are made with {VERSION} and nothing else")
    for name in ("matplotlib", "tqdm"):  # imported on the way in, never used here
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    return importlib.import_module("icon_registration"), importlib.import_module("icon_registration.carl")


icon, icon_carl = import_icon()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Their builders move networks to a GPU, and their attention refuses the only kernel that a CPU has for it."""
    with (
        mock.patch.object(torch.nn.Module, "cuda", lambda self: self),
        mock.patch.object(torch.backends.cuda, "sdp_kernel", return_value=contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def rule_for_noise() -> Iterator[None]:
    with mock.patch.object(torch, "randn", lambda *shape: torch.from_numpy(rule.noise(shape))):
        yield


def pair(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(rule.image(rule.SHAPES[case], which)) for which in (0, 1))


def fill(network: torch.nn.Module) -> dict[str, np.ndarray]:
    """Give the network the rule's weights; what is stored of them are their names and shapes."""
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict({name: torch.from_numpy(value) for name, value in rule.fill(shapes).items()})
    network.eval()
    return {"names": rule.to_text(shapes)}


def numbers(**values: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


# ---- networks -------------------------------------------------------------------------------------------------------


def attention(encoder: torch.nn.Module, dim: int) -> Any:
    return icon.FunctionFromVectorField(icon_carl.AttentionRegistration(encoder, dimension=dim))


def refinement(dim: int) -> Any:
    return icon.FunctionFromVectorField(icon.networks.tallUNet2(dimension=dim))


def encoder(case: str, build: Callable[[int], torch.nn.Module]) -> dict[str, np.ndarray]:
    dim = len(rule.SHAPES[case])
    registration = attention(build(dim), dim)
    stored = fill(registration)
    return stored | numbers(output=rule.thin(registration.net.net(pair(case)[0])))


def unet(case: str) -> dict[str, np.ndarray]:
    registration = refinement(len(rule.SHAPES[case]))
    stored = fill(registration)
    return stored | numbers(output=rule.thin(registration.net(*pair(case))))


# ---- losses ---------------------------------------------------------------------------------------------------------


def similarity(case: str) -> dict[str, np.ndarray]:
    first, second = pair(case)
    values = {
        "lncc": icon.LNCC(4)(first, second),
        "lncc2": icon.SquaredLNCC(4)(first, second),
        "ssd": icon.SSD()(first, second),
        "correlation": rule.thin(icon.LNCC(4).calculate_lncc(first, second)),
    }
    if first.dim() == 5:  # theirs is 3-D only
        values["mind"] = icon.MINDSSC(radius=2, dilation=2)(first, second)
    return numbers(**values)


def diffusion(case: str) -> dict[str, np.ndarray]:
    shape = rule.SHAPES[case]
    loss = icon.losses.DiffusionRegularizedNet(None, None, 1)
    loss.assign_identity_map([1, 1, *shape])
    return numbers(value=loss.compute_bending_energy_loss(loss.identity_map + torch.from_numpy(rule.field(shape, 0))))


def regularity(case: str) -> dict[str, np.ndarray]:
    shape = rule.SHAPES[case]
    loss = icon.GradientICON(None, None, 1)
    loss.assign_identity_map([1, 1, *shape])

    def transform(which: int) -> Callable[[torch.Tensor], torch.Tensor]:
        displacement = loss.as_function(torch.from_numpy(rule.field(shape, which)))
        return lambda points: points + displacement(points)

    seen: list[torch.Tensor] = []

    def inner(points: torch.Tensor) -> torch.Tensor:
        seen.append(points)
        return transform(1)(points)

    with rule_for_noise():
        value = loss.compute_gradient_icon_loss(transform(0), inner)
    return numbers(value=value, points=seen[0])


# ---- whole registrations --------------------------------------------------------------------------------------------


def narrower(network: Any, width: int) -> Any:
    """Tell their attention, which expects 128, how long its feature vectors are."""
    for module in network.modules():
        if isinstance(module, icon_carl.AttentionRegistration):
            module.dim = width
    return network


def carl(case: str, width: int = 128) -> Any:
    shape = rule.SHAPES[case]
    build = functools.partial(icon_carl.NoDownsampleNet, output_dim=width)
    with mock.patch.object(icon_carl, "NoDownsampleNet", build):
        return narrower(icon_carl.make_network_final_final([1, 1, *shape], len(shape)), width)


def carl_rot(case: str, width: int) -> Any:
    shape = rule.SHAPES[case]
    build = functools.partial(icon_carl.NoDownsampleNetBroad, output_dim=width)
    with mock.patch.object(icon_carl, "NoDownsampleNetBroad", build):
        return narrower(icon_carl.make_network_final_rotation([1, 1, *shape], len(shape)), width)


def gradicon(case: str) -> Any:
    """The tree of their pretrained lung network, which they build in 3-D only."""
    shape = rule.SHAPES[case]
    down = functools.partial(icon.DownsampleRegistration, dimension=len(shape))
    psi = functools.partial(refinement, len(shape))
    tree = icon.TwoStepRegistration(down(psi()), psi())
    tree = icon.TwoStepRegistration(icon.TwoStepRegistration(down(tree), psi()), psi())
    loss = icon.losses.GradientICONSparse(tree, icon.LNCC(5), 1.5)
    loss.assign_identity_map([1, 1, *shape])
    return loss


def registration(case: str, loss: Any, with_loss: bool = False) -> dict[str, np.ndarray]:
    """One forward pass: displacements at the voxels, and how far each step moved its own."""
    stored = fill(loss)
    moves: list[torch.Tensor] = []

    def record(_module: torch.nn.Module, _images: Any, field: torch.Tensor) -> None:
        voxels = torch.tensor(field.shape[2:]) - 1
        moves.append((field * voxels.reshape(1, -1, *(1,) * len(voxels))).square().sum(dim=1).mean().sqrt())

    for module in loss.modules():
        if isinstance(module, (icon.networks.UNet2, icon_carl.AttentionRegistration)):
            module.register_forward_hook(record)
    first, second = pair(case)
    identity = loss.identity_map
    stored |= numbers(output=rule.thin(loss.regis_net(first, second)(identity) - identity))
    stored |= numbers(moves=torch.stack(moves))
    if with_loss:
        with rule_for_noise():
            result = loss(first, second)
        stored |= numbers(
            backward=rule.thin(loss.phi_BA_vectorfield - identity),
            similarity=result.similarity_loss,
            regularity=result.inverse_consistency_loss,
        )
        # The loss does not show its points; these are its noise of one or two voxels, on every or every second voxel.
        spread = torch.from_numpy(rule.noise(identity.shape)) / identity.shape[-1]
        sparse = isinstance(loss, icon.losses.GradientICONSparse)
        points = (identity + 2 * spread)[:, :, ::2, ::2] if sparse else identity + spread
        stored |= numbers(points=points)
    return stored


def main() -> None:
    torch.set_num_threads(2)
    with torch.no_grad(), on_cpu():
        cases = {
            "encoder-2d": encoder("encoder-2d", icon_carl.NoDownsampleNet),
            "encoder-3d": encoder("encoder-3d", icon_carl.NoDownsampleNet),
            "broad-3d": encoder("broad-3d", lambda dim: icon_carl.Equivariantize(icon_carl.NoDownsampleNetBroad(dim))),
            "unet-2d": unet("unet-2d"),
            "unet-3d": unet("unet-3d"),
            "similarity-2d": similarity("similarity-2d"),
            "similarity-3d": similarity("similarity-3d"),
            "diffusion-2d": diffusion("diffusion-2d"),
            "diffusion-3d": diffusion("diffusion-3d"),
            "regularity-2d": regularity("regularity-2d"),
            "regularity-3d": regularity("regularity-3d"),
            "carl-2d": registration("carl-2d", carl("carl-2d"), with_loss=True),
            # Narrower encoders keep the tests short; the full width is in the encoders' own cases.
            "carl-3d": registration("carl-3d", carl("carl-3d", width=64)),
            "carl-rot-3d": registration("carl-rot-3d", carl_rot("carl-rot-3d", width=32)),
            "gradicon-2d": registration("gradicon-2d", gradicon("gradicon-2d"), with_loss=True),
        }
    arrays = {f"{case}/{name}": array for case, stored in cases.items() for name, array in stored.items()}
    np.savez_compressed(OUTPUT, version=np.array(VERSION), **arrays)
    for name, array in arrays.items():
        if name.endswith("moves"):
            print(name, array)
    print(f"{OUTPUT.name}: {len(arrays)} arrays, {OUTPUT.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
