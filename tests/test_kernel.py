"""The Triton kernels against the plain reference: here in Triton's interpreter, in float32, since the interpreter's
half-precision products are wrong; on a GPU as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from carlreg.fast.attention import LARGEST_LOGIT
from carlreg.geometry.grids import Grid
from carlreg.model.attention import attention_moments, coordinate_attention, reference_attention

pytest.importorskip("triton", minversion="3.2", reason="Triton 3.2 or later is not installed")
kernel = pytest.importorskip("carlreg.fast.kernels.attention")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KINDS = ["sharp", "flat", "trained"]


def unit(features: Tensor, length: float = 4.0) -> Tensor:
    return length * features / features.norm(dim=-1, keepdim=True)


def features(kind: str, batch: int, queries: int, keys: int, width: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 4: each query like one key; all similar; or similar with small differences."""
    k = torch.randn(batch, keys, width, device=DEVICE)
    noise = torch.randn(batch, queries, width, device=DEVICE)
    q = k[:, torch.randperm(keys, device=DEVICE)[torch.arange(queries, device=DEVICE) % keys]]
    common = torch.randn(width, device=DEVICE)
    if kind == "sharp":
        return unit(q + 0.1 * noise), unit(k)
    if kind == "flat":
        return unit(common + 0.2 * noise), unit(common + 0.2 * k)
    return unit(q + 0.3 * noise + common), unit(k + common)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(kernel, "FORWARD", {"BLOCK_Q": 32, "BLOCK_K": 16, "STAGES": 1, "num_warps": 4})
        monkeypatch.setattr(kernel, "FORWARD_SECOND", {"BLOCK_Q": 16, "BLOCK_K": 32, "STAGES": 1, "num_warps": 4})
        monkeypatch.setattr(kernel, "BACKWARD_QUERIES", {"BLOCK_Q": 16, "BLOCK_K": 32, "STAGES": 1, "num_warps": 4})
        monkeypatch.setattr(kernel, "BACKWARD_KEYS", {"BLOCK_Q": 32, "BLOCK_K": 16, "STAGES": 1, "num_warps": 4})
        monkeypatch.setattr(kernel, "PROGRAMS", 8)


RAGGED = [((37,), 5), ((300,), 33), ((7, 9), 45), ((1, 1), 1), ((3, 5, 7), 50), ((2, 1, 23), 16), ((5, 4, 4), 97)]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("shape", "queries"), RAGGED, ids=str)
@pytest.mark.parametrize("width", [16, 40, 128])
def test_against_the_reference(shape: tuple[int, ...], queries: int, width: int) -> None:
    grid = Grid(shape, tuple(-0.3 - a for a in range(len(shape))), tuple(0.1 * (a + 1) for a in range(len(shape))))
    q, k = (t.requires_grad_() for t in features("trained", 2, queries, grid.count, width))
    upstream = (
        torch.randn(2, queries, len(shape), device=DEVICE) * torch.logspace(-6, 2, queries, device=DEVICE)[:, None]
    )
    upstream[:, 0] = 0  # as where an image is blank
    answer = kernel.kernel_attention(q, k, grid, dtype=torch.float32)
    points = grid.points(torch.float64, DEVICE).reshape(1, -1, len(shape))
    exact = reference_attention(q.double(), k.double(), points)
    assert answer.dtype == torch.float32
    assert (answer - exact).abs().max() < 1e-6 * exact.abs().max().clamp(min=10)  # coordinates reach 30 here
    ours = torch.autograd.grad(answer, (q, k), upstream)
    theirs = torch.autograd.grad(exact, (q, k), upstream.double())
    for gradient, expected in zip(ours, theirs, strict=True):
        # Row by row for the queries, whose gradients differ by eight orders of magnitude here.
        assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-12
    assert not ours[0][:, 0].any()
    if grid.count > 1 and queries > 1:
        rows = theirs[0][:, 1:].norm(dim=-1)
        assert ((ours[0] - theirs[0])[:, 1:].norm(dim=-1) / rows).max() < 1e-3


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_features_are_scaled_to_a_length(width: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4·f / (1e-3 + ‖f‖) and its gradients, also for features near zero."""
    precise = kernel.kernel_attention
    monkeypatch.setattr(kernel, "kernel_attention", lambda *a: precise(*a, dtype=torch.float32))
    grid = Grid.of((3, 5, 4))
    q, k = (f * torch.logspace(-4, 2, f.shape[1], device=DEVICE)[:, None] for f in features("flat", 2, 33, 60, width))
    q[:, 3] = 0  # as where an image is blank
    q, k = q.requires_grad_(), k.requires_grad_()
    answer = coordinate_attention(q, k, grid, length=4.0, backend=backend)
    q64, k64 = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    scaled = (4 * f / (1e-3 + f.norm(dim=-1, keepdim=True)) for f in (q64, k64))
    exact = reference_attention(*scaled, grid.points(torch.float64, DEVICE).reshape(1, -1, 3))
    assert (answer - exact).abs().max() < 1e-5
    upstream = torch.randn(2, 33, 3, device=DEVICE)
    ours = torch.autograd.grad(answer, (q, k), upstream)
    theirs = torch.autograd.grad(exact, (q64, k64), upstream.double())
    for gradient, expected in zip(ours, theirs, strict=True):
        assert ((gradient - expected).norm(dim=-1) <= 1e-3 * expected.norm(dim=-1) + 1e-9).all()


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("shape", [(40,), (6, 11), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_moments_against_direct_sums(shape: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        precise = kernel.kernel_moments
        monkeypatch.setattr(kernel, "kernel_moments", lambda q, k, g: precise(q, k, g, dtype=torch.float32))
    grid = Grid.of(shape).pad(1)
    q, k = features("trained", 2, 21, grid.count, 32)
    mean, covariance = attention_moments(q, k, grid, backend=backend)
    weights = (q.double() @ k.double().mT).softmax(dim=-1)
    points = grid.points(torch.float64, DEVICE).reshape(-1, len(shape))
    expected = weights @ points
    centred = points - expected[:, :, None]
    spread = torch.einsum("bnk,bnkd,bnke->bnde", weights, centred, centred)
    tolerance = 1e-2 if GPU and backend == "triton" else 1e-4
    assert (mean - expected).abs().max() < tolerance * 0.1
    assert (covariance - spread).abs().max() < tolerance * spread.abs().max()
    assert torch.linalg.eigvalsh(covariance.double()).min() > -1e-4


@pytest.mark.usefixtures("_small_blocks")
def test_the_answer_is_a_convex_combination() -> None:
    """The same weights in numerator and denominator: matches never leave the box of the keys."""
    grid = Grid.of((4, 5, 6)).pad(2)
    q, k = features("flat", 1, 64, grid.count, 16)
    answer = kernel.kernel_attention(q, k, grid, dtype=torch.float32)
    points = grid.points(torch.float32, DEVICE).reshape(-1, 3)
    assert (answer >= points.amin(dim=0)).all()
    assert (answer <= points.amax(dim=0)).all()


def test_long_axes_keep_their_digits() -> None:
    """Positions beyond 256, which bfloat16 cannot hold, are split exactly."""
    positions = kernel._positions((3, 7000, 2), torch.empty(0, dtype=torch.float16, device=DEVICE)).double()
    assert torch.equal(
        positions[:, 4] + positions[:, 6], torch.arange(7000.0, device=DEVICE).double().repeat_interleave(2).repeat(3)
    )
    with pytest.raises(ValueError, match="expected at most 65536 voxels a side"):
        kernel._positions((70_000,), torch.empty(0, device=DEVICE))


def test_what_only_the_kernel_asks_for() -> None:
    q, k = features("sharp", 1, 8, 12, 16)
    with pytest.raises(TypeError, match="take positions as a Grid"):
        coordinate_attention(q, k, torch.rand(12, 2, device=DEVICE), backend="triton")
    with pytest.raises(ValueError, match="the grid has 10 points for 12 keys"):
        coordinate_attention(q, k, Grid.of((10,)), backend="triton")


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [24, 44])
def test_accuracy_on_the_gpu(kind: str, side: int) -> None:
    """Against float64, in voxels: 0.02 at the worst, 0.002 on average; gradients within 1 %."""
    grid = Grid.of((side,) * 3).pad(9)
    q, k = (t.requires_grad_() for t in features(kind, 1, 4096, grid.count, 128))
    answer = kernel.kernel_attention(q, k, grid)
    points = grid.points(torch.float64, "cuda").reshape(1, -1, 3)
    upstream = torch.randn_like(answer)
    exact, gradients = [], [torch.zeros_like(t, dtype=torch.float64) for t in (q, k)]
    for rows in torch.arange(4096, device="cuda").split(256):
        part = [q[:, rows].detach().double().requires_grad_(), k.detach().double().requires_grad_()]
        exact.append(reference_attention(*part, points))
        by_query, by_key = torch.autograd.grad(exact[-1], part, upstream[:, rows].double())
        gradients[0][:, rows] = by_query
        gradients[1] += by_key
    error = ((answer - torch.cat(exact, dim=1)) * (side - 1)).norm(dim=-1)
    print(f"{kind} {side}: worst {error.max():.2e}, mean {error.mean():.2e} voxels")
    assert error.max() < 0.02
    assert error.mean() < 0.002
    for ours, expected in zip(torch.autograd.grad(answer, (q, k), upstream), gradients, strict=True):
        relative = float((ours - expected).norm() / expected.norm())
        print(f"  gradient {relative:.2e}")
        assert relative < 0.01


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    grid = Grid.of((30, 31, 29)).pad(9)
    q, k = (t.requires_grad_() for t in features("trained", 2, 5000, grid.count, 128))
    upstream = torch.randn(2, 5000, 3, device="cuda")
    runs = []
    for _ in range(3):
        answer = kernel.kernel_attention(q, k, grid)
        runs.append((answer, *torch.autograd.grad(answer, (q, k), upstream)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "chunked", "triton"])
def test_backends_agree_on_the_gpu(backend: str) -> None:
    grid = Grid.of((14, 15, 16)).pad(9)
    q, k = features("trained", 2, 3000, grid.count, 128)
    answer = coordinate_attention(q, k, grid, bound=16.0, backend=backend)
    expected = coordinate_attention(q.double(), k.double(), grid, backend="reference")
    assert ((answer - expected) * 15).norm(dim=-1).max() < 0.02


@pytest.mark.gpu
def test_the_kernel_is_chosen_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid.of((10, 10, 10))
    q, k = features("trained", 1, 100, grid.count, 64)
    calls = []
    original = kernel.kernel_attention
    monkeypatch.setattr(kernel, "kernel_attention", lambda *a: calls.append(1) or original(*a))
    coordinate_attention(q, k, grid, bound=16.0)
    assert not calls
    with torch.autocast("cuda", torch.bfloat16):
        coordinate_attention(q, k, grid, bound=16.0)
        assert len(calls) == 1
        coordinate_attention(q, k, grid)  # unbounded logits need a running maximum
        coordinate_attention(q, k, grid, bound=1e4)
    assert len(calls) == 1


def test_the_kernel_can_be_chosen_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before a kernel is used, on a pretended GPU of the right kind."""
    from carlreg import fast

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fast.why_not.__wrapped__(0) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    assert fast.why_not.__wrapped__(0) == "an old GPU has a compute capability below 8.0"


def test_largest_logit_leaves_room() -> None:
    """exp of the largest logit, summed over 2^30 keys and times the largest coordinate squared, stays finite."""
    assert LARGEST_LOGIT * kernel.LOG2_E + 30 + 2 * math.log2(256) < 127 + 16
    assert LARGEST_LOGIT * kernel.LOG2_E + 30 < 127
