"""Fused kernels against the plain expressions they stand for, in float64: here in Triton's interpreter, in float32; on
a GPU as they are."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from carlreg import DisplacementField
from carlreg.fast.layers import convolve_patches
from carlreg.geometry import grids
from carlreg.geometry.grids import Grid, enlarge, interpolate
from carlreg.model.encoder import Encoder
from carlreg.model.layers import conv
from carlreg.model.unet import UNet
from carlreg.objective.losses import gaussian_blur, local_correlation

pytest.importorskip("triton", minversion="3.2", reason="Triton 3.2 or later is not installed")
channels = pytest.importorskip("carlreg.fast.kernels.channels")
correlation = pytest.importorskip("carlreg.fast.kernels.correlation")
sampling = pytest.importorskip("carlreg.fast.kernels.sampling")
upsampling = pytest.importorskip("carlreg.fast.kernels.upsampling")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 3, 5, 7, 3), (1, 16, 9, 40), (3, 5, 1, 1, 2), (2, 128, 4, 5, 3)]


def channels_last(*shape: int) -> Tensor:
    """Random features (B, C, *shape) with a mean and a scale of their own in each channel."""
    features = torch.randn(shape[0], *shape[2:], shape[1], device=DEVICE)
    features = features * torch.logspace(-1, 1, shape[1], device=DEVICE) + 3 * torch.randn(shape[1], device=DEVICE)
    return features.movedim(-1, 1).requires_grad_()


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_same(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    for mine, right in zip(ours, exact, strict=True):
        assert mine.shape == right.shape
        assert (mine - right).abs().max() <= tolerance * right.abs().max() + 1e-12


@pytest.fixture
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "TILE", 64)
    monkeypatch.setattr(channels, "PROGRAMS", 5)


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bias", "relu", "add"])
def test_bias(shape: tuple[int, ...], kind: str) -> None:
    features, other = channels_last(*shape), channels_last(*shape)
    bias = torch.randn(shape[1], device=DEVICE, requires_grad=True)
    inputs = (features, bias, other) if kind == "add" else (features, bias)
    exact = double(*inputs)
    answer = channels.add_bias(features, bias, other=other if kind == "add" else None, relu=kind == "relu")
    expected = sum(exact[2:], exact[0] + exact[1].reshape(1, -1, *(1,) * (len(shape) - 2)))
    expected = expected.relu() if kind == "relu" else expected
    assert_same((answer,), (expected,))
    upstream = torch.randn(shape, device=DEVICE)  # not channels last
    assert_same(torch.autograd.grad(answer, inputs, upstream), torch.autograd.grad(expected, exact, upstream.double()))


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("far", [0.0, 300.0])
def test_batch_norm(shape: tuple[int, ...], far: float) -> None:
    """Result, gradients and running statistics; also where the mean is far larger than the deviation."""
    features = (channels_last(*shape).detach() + far).requires_grad_()
    ours = (nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 4](shape[1]).to(DEVICE)
    nn.init.normal_(ours.weight)
    nn.init.normal_(ours.bias)
    theirs = copy.deepcopy(ours).double()
    (precise,) = double(features)
    answer, expected = channels.batch_norm(features, ours), theirs(precise)
    tolerance = 1e-5 if far == 0 else 1e-3
    assert_same((answer,), (expected,), tolerance)
    assert_same(tuple(ours.buffers()), tuple(theirs.buffers()))
    upstream = torch.randn(shape, device=DEVICE)
    assert_same(
        torch.autograd.grad(answer, (features, ours.weight, ours.bias), upstream),
        torch.autograd.grad(expected, (precise, theirs.weight, theirs.bias), upstream.double()),
        tolerance,
    )


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", [Encoder, UNet])
def test_networks_are_the_same_with_kernels(
    network: type[Encoder] | type[UNet], dim: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Encoder(dim, width=8) if network is Encoder else UNet(dim, down=(4, 8), up=(8, 4))
    plain = plain.to(DEVICE).train(training)
    if isinstance(plain, UNet):
        nn.init.normal_(plain.last.weight)
    fused = copy.deepcopy(plain)
    images = [torch.rand(2, 1, *(7, 6, 9)[:dim], device=DEVICE) for _ in range(1 if network is Encoder else 2)]
    expected = plain(*images)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    calls = []
    monkeypatch.setattr(
        "carlreg.fast.layers._kernels_take", lambda f: f.movedim(1, -1).is_contiguous() and not calls.append(1)
    )
    monkeypatch.setattr("carlreg.fast.layers.channels_last", channels._channels_last)
    monkeypatch.setattr("carlreg.fast.layers._is_small", lambda _: False)
    answer = fused(*images)
    answer.backward(upstream)
    assert len(calls) >= (10 if network is Encoder else (2 * training + 2 * (dim == 3)))
    assert (answer - expected).norm() < 1e-4 * expected.norm()
    for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() < 1e-3 * theirs.grad.norm() + 1e-3, name


@pytest.mark.parametrize("dim", [2, 3])
def test_convolution_by_patches(dim: int) -> None:
    image = torch.randn(2, 3, *(5, 4, 6)[:dim], dtype=torch.float64, device=DEVICE, requires_grad=True)
    layer = conv(dim)(3, 8, 3, padding="same", bias=False, dtype=torch.float64, device=DEVICE)
    answer, expected = convolve_patches(image, layer.weight), layer(image)
    upstream = torch.randn_like(expected)
    assert_same((answer,), (expected,), 1e-12)
    assert_same(
        torch.autograd.grad(answer, (image, layer.weight), upstream),
        torch.autograd.grad(expected, (image, layer.weight), upstream),
        1e-12,
    )


@pytest.mark.parametrize(("shape", "inputs", "outputs"), [((2, 3, 4), 5, 3), ((1, 2, 1), 2, 2)], ids=str)
def test_up_step(shape: tuple[int, ...], inputs: int, outputs: int) -> None:
    features, shortcut = channels_last(2, inputs, *shape), channels_last(2, inputs, *shape)
    weight = torch.randn(inputs, outputs, 4, 4, 4, device=DEVICE, requires_grad=True)
    bias = torch.randn(outputs, device=DEVICE, requires_grad=True)
    exact = double(features, shortcut, weight, bias)
    answer = upsampling.up_step(features, shortcut, weight, bias)
    expected = nn.functional.conv_transpose3d(exact[0], exact[2], exact[3], stride=2, padding=1)
    expected = expected + enlarge(exact[1][:, :outputs])
    assert_same((answer,), (expected,))
    upstream = torch.randn(answer.shape, device=DEVICE)
    assert_same(
        torch.autograd.grad(answer, (features, shortcut, weight, bias), upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
    )


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize(
    ("shape", "grid", "batches"),
    [
        ((5,), (37,), (2, 2)),
        ((6, 3), (9, 11), (1, 2)),
        ((3, 4, 3), (5, 6, 7), (2, 1)),
        ((9, 8, 7), (3, 2, 6), (2, 2)),
        ((1, 4, 2), (40,), (1, 1)),
    ],
    ids=str,
)
def test_displaced_points(
    shape: tuple[int, ...], grid: tuple[int, ...], batches: tuple[int, int], mirror: bool
) -> None:
    """Sampling a field in and around its cube: at scattered points, or near a finer or coarser grid."""
    dim = len(shape)
    field = (0.2 * torch.randn(batches[0], dim, *shape, device=DEVICE)).requires_grad_()
    if dim == len(grid):
        points = Grid.of(grid).pad(1).points(device=DEVICE)[None] + 0.03 * torch.randn(
            batches[1], *(n + 2 for n in grid), dim, device=DEVICE
        )
    else:
        points = 4 * torch.rand(batches[1], *grid, dim, device=DEVICE) - 1.5
    points.requires_grad_()
    field64, points64 = double(field, points)
    answer = sampling.sample(field, points, mirror=mirror, add=True)
    expected = DisplacementField(field64, "mirror" if mirror else "clamp")(points64)
    assert_same((answer,), (expected,))
    upstream = torch.randn(answer.shape, device=DEVICE)
    ours = torch.autograd.grad(answer, (field, points), upstream)
    theirs = torch.autograd.grad(expected, (field64, points64), upstream.double())
    assert_same(ours, theirs, 1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_sampled_images(channels_last: bool) -> None:
    image = torch.randn(2, 3, 4, 5, 6, device=DEVICE)
    if channels_last:
        image = image.movedim(1, -1).contiguous().movedim(-1, 1)
    points = 1.5 * torch.rand(2, 7, 3, device=DEVICE) - 0.2
    image64, points64 = double(image.requires_grad_(), points.requires_grad_())
    answer, expected = sampling.sample(image, points), interpolate(image64, points64)
    assert_same((answer,), (expected,))
    upstream = torch.randn(answer.shape, device=DEVICE)
    assert_same(
        torch.autograd.grad(answer, (image, points), upstream),
        torch.autograd.grad(expected, (image64, points64), upstream.double()),
    )


@pytest.mark.parametrize("shape", [(2, 1, 9, 11, 10), (1, 3, 20, 17), (2, 2, 40)], ids=str)
@pytest.mark.parametrize("far", [0.0, 20.0])
@pytest.mark.parametrize("both", [True, False])
def test_local_correlation(shape: tuple[int, ...], far: float, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros outside the image, also for images far from zero, whose windows drop at the border. There, rounding
    leaves about 1e-7 far² of a variance of 0.08, more or less depending on the order in which a processor adds."""
    monkeypatch.setattr(correlation, "BLOCK", 256)
    first, second = (torch.rand(shape, device=DEVICE) + far for _ in range(2))
    second[..., :3] = far  # flat
    first, second = first.requires_grad_(), second.requires_grad_(both)
    exact = [image.detach().double().requires_grad_(image.requires_grad) for image in (first, second)]
    blur = functools.partial(gaussian_blur, sigma=2.0)
    answer, expected = correlation.local_correlation(first, second, blur, 1e-5), local_correlation(*exact, 2.0)
    tolerance = 1e-4 if far == 0 else 1e-2
    assert_same((answer,), (expected,), tolerance)
    upstream = torch.randn(shape, device=DEVICE)
    inputs = [first, second][: 1 + both]
    assert_same(
        torch.autograd.grad(answer, inputs, upstream),
        torch.autograd.grad(expected, exact[: 1 + both], upstream.double()),
        tolerance,
    )


def test_slopes_at_the_border_without_kernels() -> None:
    """Sampling by index: at the last voxel the slope is that of the last cell, not that of a fall to zero."""
    image = torch.tensor([5.0, 6.0, 8.0], dtype=torch.float64).reshape(1, 1, 3)
    points = torch.tensor([0.0, 0.75, 1.0], dtype=torch.float64).reshape(1, 3, 1).requires_grad_()
    values = grids._sample_by_index(image, points, "linear", "border")
    assert values.flatten().tolist() == [5.0, 7.0, 8.0]
    (slope,) = torch.autograd.grad(values.sum(), points)
    assert slope.flatten().tolist() == [2.0, 4.0, 4.0]
