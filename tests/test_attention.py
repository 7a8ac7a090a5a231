"""Coordinate attention: the paper's two properties, and every backend against the plain one."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor

from carlreg import coordinate_attention
from carlreg.geometry.grids import Grid
from carlreg.geometry.transforms import Affine
from carlreg.model import attention

LINEAR_MEMORY = ["chunked", "fused"]


def features(batch: int, queries: int, keys: int, width: int = 16, length: float = 4.0) -> tuple[Tensor, Tensor]:
    q, k = (torch.randn(batch, n, width, dtype=torch.float64) for n in (queries, keys))
    return length * q / q.norm(dim=-1, keepdim=True), length * k / k.norm(dim=-1, keepdim=True)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks small enough that every test crosses their borders."""
    monkeypatch.setattr(attention, "BLOCK", 17)


@pytest.mark.parametrize("backend", ["auto", "reference", *LINEAR_MEMORY])
@pytest.mark.parametrize("shape", [(37,), (9, 8), (5, 4, 6)])
def test_against_a_direct_sum(backend: str, shape: tuple[int, ...]) -> None:
    grid = Grid.of(shape).pad(2)
    count = grid.points().reshape(-1, len(shape)).shape[0]
    queries, keys = features(2, 11, count)
    points = grid.points(torch.float64).reshape(count, -1)
    result = coordinate_attention(queries, keys, grid, backend=backend)
    for item, row in [(0, 0), (1, 10)]:
        weights = torch.exp(torch.stack([queries[item, row] @ key for key in keys[item]]))
        expected = sum(w * p for w, p in zip(weights / weights.sum(), points, strict=True))
        assert torch.allclose(result[item, row], expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1.0, 4.0, 8.0, 30.0])
def test_a_bound_on_the_logits_changes_nothing(length: float, dtype: torch.dtype) -> None:
    """Up to 64 they need no running maximum; beyond, exp would overflow without it."""
    queries, keys = (part.to(dtype) for part in features(2, 40, 150, length=length))
    queries[0, :20] = keys[0, :20]  # the largest logits there can be
    queries[1, :20] = -keys[1, :20]
    points = torch.rand(150, 3, dtype=dtype)
    bounded = attention.chunked_attention(queries, keys, points[None], bound=length**2)
    tolerance = (1e-12 if dtype == torch.float64 else 2e-7) * max(length**2, 10)  # of the logits
    exact = attention.reference_attention(queries.double(), keys.double(), points.double())
    assert torch.allclose(bounded.double(), exact, rtol=0, atol=tolerance)
    assert torch.allclose(attention.chunked_attention(queries, keys, points[None]), bounded, rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_several_threads_give_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = features(2, 90, 100)
    points = torch.rand(1, 100, 3, dtype=torch.float64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    result = attention.chunked_attention(queries, keys, points, 16.0)
    assert torch.allclose(result, attention.reference_attention(queries, keys, points), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", *LINEAR_MEMORY])
def test_weights_are_a_partition_of_unity(backend: str) -> None:
    """Attention over positions that are all the same gives that position, and over a box stays in the box."""
    queries, keys = features(2, 30, 200, length=6.0)
    same = torch.tensor([0.3, -2.0], dtype=torch.float64).expand(200, 2)
    assert torch.allclose(coordinate_attention(queries, keys, same, backend=backend), same[:30].expand(2, -1, -1))
    inside = coordinate_attention(queries, keys, torch.rand(200, 3, dtype=torch.float64), backend=backend)
    assert inside.min() > 0
    assert inside.max() < 1


@pytest.mark.parametrize("backend", ["reference", *LINEAR_MEMORY])
def test_commutes_with_affine_maps(backend: str) -> None:
    """The lemma of the appendix: T[K, Q, f ∘ V] = f ∘ T[K, Q, V]."""
    queries, keys = features(1, 20, 150)
    points = torch.rand(1, 150, 3, dtype=torch.float64)
    affine = Affine(torch.randn(1, 3, 4, dtype=torch.float64))
    mapped = coordinate_attention(queries, keys, affine(points), backend=backend)
    assert torch.allclose(mapped, affine(coordinate_attention(queries, keys, points, backend=backend)), atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", *LINEAR_MEMORY])
def test_commutes_with_permutations(backend: str) -> None:
    """T[K ∘ P1, Q ∘ P2, V ∘ P1] = T[K, Q, V] ∘ P2."""
    queries, keys = features(1, 20, 150)
    points = torch.rand(150, 2, dtype=torch.float64)
    p1, p2 = torch.randperm(150), torch.randperm(20)
    permuted = coordinate_attention(queries[:, p2], keys[:, p1], points[p1], backend=backend)
    assert torch.allclose(permuted, coordinate_attention(queries, keys, points, backend=backend)[:, p2], atol=1e-12)


@pytest.mark.parametrize("backend", LINEAR_MEMORY)
@pytest.mark.parametrize("length", [1.0, 4.0, 16.0])
def test_gradients_against_the_reference(backend: str, length: float) -> None:
    queries, keys = features(2, 23, 101, length=length)
    points, upstream = torch.rand(101, 3, dtype=torch.float64), torch.randn(2, 23, 3, dtype=torch.float64)

    def gradients(name: str) -> tuple[Tensor, ...]:
        inputs = [tensor.clone().requires_grad_() for tensor in (queries, keys, points)]
        return torch.autograd.grad(coordinate_attention(*inputs, backend=name), inputs, upstream)

    for ours, reference in zip(gradients(backend), gradients("reference"), strict=True):
        assert (ours - reference).norm() <= 1e-12 * reference.norm()


def test_logits_far_beyond_the_range_of_exp() -> None:
    queries, keys = features(1, 10, 60, length=60.0)
    points = torch.rand(60, 2, dtype=torch.float64)
    result = coordinate_attention(queries.float(), keys.float(), points.float())
    nearest = points[(queries @ keys.mT).argmax(dim=-1)]
    assert torch.allclose(result.double(), nearest, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coordinates_stay_precise_with_half_precision_features(dtype: torch.dtype) -> None:
    queries, keys = features(1, 40, 300)
    queries, keys = queries.to(dtype), keys.to(dtype)
    points = torch.rand(300, 3, dtype=torch.float64)
    exact = coordinate_attention(queries.double(), keys.double(), points, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        result = coordinate_attention(queries, keys, points.float())
    assert result.dtype == torch.float32
    assert (result - exact).abs().max() < 1e-5


@pytest.mark.parametrize("backend", LINEAR_MEMORY)
def test_memory_stays_far_below_the_matrix_of_all_pairs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    queries, keys = (tensor.float().requires_grad_() for tensor in features(1, 12_000, 12_000, width=8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    coordinate_attention(queries, keys, Grid.of((12_000,)), backend=backend).sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 200, f"grew by {grown:.0f} MiB; the matrix would take 549 MiB, and twice that backward"


def test_bad_input_is_named() -> None:
    queries, keys = features(1, 4, 6)
    points = torch.rand(6, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"queries have shape \(4, 16\); expected \(B, number, features\)"):
        coordinate_attention(queries[0], keys, points)
    with pytest.raises(ValueError, match="expected the same batch size and feature length"):
        coordinate_attention(queries[..., :8], keys, points)
    with pytest.raises(ValueError, match="expected one position per key"):
        coordinate_attention(queries, keys, points[:5])
    with pytest.raises(TypeError, match=r"queries have dtype torch.int64; expected floating point"):
        coordinate_attention(queries.long(), keys, points)
    with pytest.raises(ValueError, match="unknown attention backend 'magic'"):
        coordinate_attention(queries, keys, points, backend="magic")
