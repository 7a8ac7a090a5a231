"""Whole networks on a GPU: the fast path against the plain one, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from conftest import randomize
from torch import Tensor

from carlreg import (
    PredictDisplacement,
    RegistrationAlgorithm,
    carl,
    carl_rot,
    instance_optimize,
    registration_loss,
    xi,
)
from carlreg.fast.layers import normalize
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.transforms import warp
from carlreg.model.unet import UNet
from carlreg.registration.rotation_search import search_rotation
from carlreg.synthesis import random_anatomy
from carlreg.training.batches import Batch
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

pytestmark = pytest.mark.gpu

NARROW = {"unet_down": (16, 32, 32, 32, 32), "unet_up": (32, 32, 32, 32, 16)}


def smooth_images(*shape: int, batch: int = 2) -> Tensor:
    noise = torch.rand(batch, 1, *(6,) * len(shape), device="cuda")
    mode = {2: "bilinear", 3: "trilinear"}[len(shape)]
    return torch.nn.functional.interpolate(noise, size=shape, mode=mode)


def network(dim: int, moving: Tensor, fixed: Tensor) -> RegistrationAlgorithm:
    return randomize(carl(dim, width=64, **NARROW).cuda(), moving, fixed, move=2.0).requires_grad_(True)


@pytest.mark.parametrize("part", ["attention", "refinement"])
@pytest.mark.parametrize("shape", [(64, 72, 57), (96, 80)], ids=str)
def test_the_fast_path_agrees_with_float32(part: str, shape: tuple[int, ...]) -> None:
    """Where the answer is well determined: Ξθ on a texture and the same shifted, so that matches are unique; Ψ on
    smooth images, moving points by two voxels."""
    if part == "attention":
        coarse = torch.rand(1, 1, *(-(-n // 4) for n in shape), device="cuda")
        moving = torch.nn.functional.interpolate(coarse, size=shape)
        fixed = moving.roll((8, -4), dims=(2, 3))
        model = randomize(xi(len(shape), width=64).cuda(), moving, fixed)
    else:
        moving, fixed = smooth_images(*shape).split(1)
        model = randomize(PredictDisplacement(UNet(len(shape))).cuda(), moving, fixed, move=2.0)
    with torch.no_grad():
        exact = model(moving, fixed).on_grid_of(fixed)
        with mixed_precision(moving.device):
            fast = model(moving, fixed).on_grid_of(fixed)
            again = model(moving, fixed).on_grid_of(fixed)
    # In voxels of the grid that the part works on: attention's is pooled twice.
    voxel = 4 if part == "attention" else 1
    distance = ((fast - exact) * torch.tensor([(n - 1) / voxel for n in shape], device="cuda")).norm(dim=-1)
    print(f"mean {distance.mean():.2e}, worst {distance.max():.2e} voxels")
    assert distance.mean() < 0.05
    assert torch.equal(fast, again)
    assert fast.dtype == torch.float32


def test_gpu_and_cpu_agree() -> None:
    moving, fixed = smooth_images(40, 36, 44).split(1)
    model = network(3, moving, fixed)
    with torch.no_grad():
        gpu = model(moving, fixed).on_grid_of(fixed).cpu()
        cpu = model.cpu()(moving.cpu(), fixed.cpu()).on_grid_of(fixed.cpu())
    assert ((gpu - cpu) * 40).abs().mean() < 0.02  # convolutions on a GPU round to tf32


@pytest.mark.parametrize("channels", [16, 128])
def test_batch_normalisation_of_half_precision_features(channels: int) -> None:
    """Against PyTorch's layer in float64: result, gradients and running statistics."""
    features = (3 * torch.randn(4, channels, 9, 10, 11, device="cuda") + 1).bfloat16().requires_grad_()
    ours, exact = torch.nn.BatchNorm3d(channels).cuda(), torch.nn.BatchNorm3d(channels).cuda().double()
    torch.nn.init.normal_(ours.weight)
    exact.load_state_dict(ours.state_dict())
    precise = features.detach().double().requires_grad_()
    upstream = torch.randn(features.shape, device="cuda").bfloat16()
    answer, expected = normalize(ours, features), exact(precise)
    assert answer.dtype == torch.bfloat16
    assert (answer - expected).abs().max() < 0.02 * expected.abs().max()
    gradients = torch.autograd.grad(answer, (features, ours.weight, ours.bias), upstream)
    theirs = torch.autograd.grad(expected, (precise, exact.weight, exact.bias), upstream.double())
    for gradient, right in zip(gradients, theirs, strict=True):
        assert (gradient - right).norm() < 0.01 * right.norm()
    for name, value in ours.named_buffers():
        assert torch.allclose(value.double(), exact.get_buffer(name).double(), rtol=1e-4), name


@pytest.mark.parametrize("rotations", [False, True])
def test_training_is_deterministic_where_asked(rotations: bool) -> None:
    moving, fixed = smooth_images(32, 36, 30, batch=4).split(2)
    make = carl_rot if rotations else carl
    start = make(3, 2, width=16, **NARROW).state_dict()

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = make(3, 2, width=16, **NARROW)
        model.load_state_dict(start)
        model.cuda().train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            with mixed_precision(moving.device):
                phi, inverse = model.both(moving, fixed)
            registration_loss(phi, inverse, moving, fixed, generator=generator).total.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = train(), train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("handed", [0, 4])
@pytest.mark.parametrize("regularity", ["diffusion", "gradicon"])
def test_graphs_change_no_step_with_rotations(regularity: str, handed: int) -> None:
    """Each step turns the images anew, with rotations that the captured graph finds in its inputs. The weights stay as
    they are: over several steps an untrained network makes one or two per cent of what half floats round away."""
    moving, fixed = smooth_images(64, 64, batch=8).split(4)
    torch.manual_seed(0)
    model = carl_rot(2, 2, width=16, handed=handed, **NARROW).cuda().train()
    losses = []
    for graphs in (False, True):
        step = TrainingStep(model, Stage(8, regularity, rotate=True), device=moving.device, graphs=graphs)
        losses.append([float(step(Batch(moving, fixed), 0.0, seed=n).total) for n in range(8)])
        assert bool(step.captured) == graphs
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert max(losses[1]) > 1.02 * min(losses[1])  # the rotations matter


def test_a_look_sees_the_same_on_the_gpu() -> None:
    shape = (48, 48, 48)
    made = random_anatomy(shape, generator=torch.Generator().manual_seed(3), body=(0.3, 0.4), shift=0.03)
    turned = warp(made.moving, random_rotation(shape, 1, like=made.moving), like=made.moving, outside="zeros")
    here, there = search_rotation(turned, made.fixed), search_rotation(turned.cuda(), made.fixed.cuda())
    assert there.transform.matrix.is_cuda
    assert there.is_rotated == here.is_rotated
    assert there.degrees == pytest.approx(here.degrees, abs=1.0)
    assert there.correlation == pytest.approx(here.correlation, abs=0.01)


def test_instance_optimisation_on_the_gpu() -> None:
    moving, fixed = smooth_images(48, 40, 44).split(1)
    model = network(3, moving, fixed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = instance_optimize(model, moving, fixed, steps=10, learning_rate=1e-4)
    assert result.losses[result.best]["total"] < result.losses[0]["total"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
