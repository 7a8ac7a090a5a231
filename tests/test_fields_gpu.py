"""Optimisation of fields on a GPU: captured as CUDA graphs, with the same bits every time, and the CPU's answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from carlreg import DisplacementField, Identity, optimize_fields, warp
from carlreg.fast import exact
from carlreg.geometry.jacobian import folding
from carlreg.objective.losses import Loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def texture(shape: tuple[int, ...], shift: float) -> Tensor:
    """Waves of at least 12 voxels."""
    axes = torch.meshgrid(*(torch.arange(n) - shift for n in shape), indexing="ij")
    generator = torch.Generator().manual_seed(3)
    waves = (2 * torch.rand(len(shape), 30, generator=generator) - 1) * 0.3
    values = torch.cos(torch.stack(axes, dim=-1) @ waves + 6.28 * torch.rand(30, generator=generator)).sum(-1)
    return (0.5 + values / 40)[None, None]


def pair(device: str) -> tuple[Tensor, Tensor]:
    return texture((40, 48, 36), 2.0).to(device), texture((44, 48, 40), 0.0).to(device)


@pytest.mark.parametrize("similarity", ["lncc", "lncc2", "ssd"])
def test_two_runs_give_the_same_bits(similarity: str) -> None:
    moving, fixed = pair("cuda")
    options: dict[str, Any] = {"steps": 6, "levels": 2, "similarity": similarity}
    first, second = (optimize_fields(Identity(), Identity(), moving, fixed, **options) for _ in range(2))
    assert first.losses == second.losses
    assert first.transform.on_grid_of(fixed).equal(second.transform.on_grid_of(fixed))


def test_the_graph_gives_the_answer_of_the_cpu() -> None:
    results = {}
    for device in ("cpu", "cuda"):
        moving, fixed = pair(device)
        results[device] = optimize_fields(Identity(), Identity(), moving, fixed, steps=8, levels=2)
        before, after = (
            float((warp(moving, phi, like=fixed) - fixed).square().mean())
            for phi in (Identity(), results[device].transform)
        )
        assert after < 0.5 * before
        assert folding(results[device].transform, fixed) == 0
    totals = [[loss["total"] for loss in results[device].losses] for device in ("cpu", "cuda")]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)
    assert totals[0][0] == pytest.approx(totals[1][0], rel=1e-3)


def test_callbacks_see_every_step_and_masks_work() -> None:
    moving, fixed = pair("cuda")
    seen: list[tuple[int, Loss]] = []
    masks = {"moving_mask": torch.ones_like(moving), "fixed_mask": (fixed > 0.5).float()}
    options: dict[str, Any] = {"steps": 3, "levels": 2, "callback": lambda *step: seen.append(step), **masks}
    result = optimize_fields(Identity(), Identity(), moving, fixed, **options)
    assert [step for step, _ in seen] == [*range(10), *range(9, 13)]
    assert [float(loss.total) for _, loss in seen[-4:]] == [loss["total"] for loss in result.losses]


def test_gradients_added_as_integers_are_right() -> None:
    torch.manual_seed(0)
    values, points = torch.rand(1, 3, 9, 8, 7, device="cuda"), torch.rand(1, 3, 5000, device="cuda")
    factor = torch.rand(1, 3, 5000, device="cuda")
    gradients = []
    for kind in (torch.float32, torch.float64):
        leaves = [one.to(kind).requires_grad_() for one in (values, points)]
        gradients.append(torch.autograd.grad((exact.sample(*leaves) * factor).sum(), leaves))
    for single, double in zip(*gradients, strict=True):
        assert torch.allclose(single.double(), double, rtol=1e-3, atol=1e-3)


def test_a_function_of_the_user_runs_without_a_graph() -> None:
    moving, fixed = pair("cuda")

    def waits(warped: Tensor, other: Tensor, /, *, mask: Tensor | None = None) -> Tensor:
        value = (warped - other).square().mean()
        assert float(value.detach()) >= 0  # synchronises
        return value

    start = DisplacementField(torch.zeros(1, 3, 8, 8, 8, device="cuda"))
    result = optimize_fields(start, start, moving, fixed, steps=3, levels=1, similarity=waits)
    assert result.losses[-1]["total"] < result.losses[0]["total"]
