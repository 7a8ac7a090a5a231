"""Kernels of the descent of fields against autograd in float64: here in Triton's interpreter, on a GPU as they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from carlreg import fast
from carlreg.objective.fields import _Level, _Settings
from carlreg.objective.windows import Picture

pytest.importorskip("triton", minversion="3.2", reason="Triton 3.2 or later is not installed")
descent = pytest.importorskip("carlreg.fast.kernels.descent")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one after the other."""
    if DEVICE == "cpu":
        monkeypatch.setattr(descent, "LANES", 2048)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRIDS = {
    "cubes": ((20, 18, 16), (17, 16, 21), (1.0, 1.0, 1.0), (1.1, 1.0, 1.0)),
    "slices": ((22, 16, 5), (16, 18, 6), (1.0, 1.2, 6.0), (1.0, 1.0, 5.0)),
}
Pair = tuple[Picture, Picture]


def pictures(name: str) -> Pair:
    torch.manual_seed(4)
    shape, other, spacing, more = GRIDS[name]
    fixed, moving = torch.rand(1, 1, *shape), torch.rand(1, 1, *other)
    fixed[..., :2, :] = 0
    return Picture(fixed, None, spacing), Picture(moving, (moving > 0.1).float(), more)


def level(pair: Pair, dtype: torch.dtype, device: str, similarity: str = "lncc", finest: bool = True) -> _Level:
    f, m = (
        Picture(one.image.to(device, dtype), None if one.mask is None else one.mask.to(device, dtype), one.spacing)
        for one in pair
    )
    return _Level(f, m, 1.0, _Settings(similarity, 1.5, 0.75, 20.0, 1.0, 2.0, 0), finest)


def shaken(one: _Level) -> list[Tensor]:
    """Positions with folds, some of them outside of the image."""
    torch.manual_seed(6)
    return [side.grid + 0.06 * torch.randn(side.grid.shape).to(side.grid) for side in one.sides]


def assert_close(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        assert (one.cpu() - other.cpu()).abs().max() <= 2e-4 * other.abs().max()


@pytest.mark.parametrize(
    ("name", "similarity", "phase", "finest"),
    [("cubes", "lncc", 1, True), ("slices", "lncc2", 0, True), ("slices", "lncc", 1, False)],
)
def test_losses_and_gradients(
    name: str, similarity: str, phase: int, finest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pictures(name)
    plain = level(pair, torch.float64, "cpu", similarity, finest)
    expected, gradients = plain._gradients(shaken(plain), torch.tensor(phase))
    monkeypatch.setattr(fast, "descends_on", lambda image: image.dtype == torch.float32)
    ours = level(pair, torch.float32, DEVICE, similarity, finest)
    assert ours._fused
    assert ours.sides[0].measures[0].fused  # type: ignore[attr-defined]
    found, by_positions = ours._gradients(shaken(ours), torch.tensor(phase, device=DEVICE))
    assert torch.allclose(found.cpu().double(), expected, rtol=1e-4)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    assert_close(by_positions, gradients)


def test_a_step_of_adam_keeps_the_best_field() -> None:
    from carlreg.objective.fields import SLOW, _adam

    torch.manual_seed(0)
    plain = [torch.rand(1, 3, 4, 5, 6, dtype=torch.float64) for _ in range(6)]
    ours = [one.float().to(DEVICE) for one in plain]
    for better in (True, False):
        paces = torch.tensor([0.3, 0.7])
        _adam(*plain, torch.tensor(better), paces.double())
        plain[4] = plain[4] + 1
        descent.adam(*ours, torch.tensor(better, device=DEVICE), paces.to(DEVICE), SLOW)
        ours[4] = ours[4] + 1
    assert_close(ours[1:], plain[1:])
    assert not torch.equal(plain[5], plain[4])


def test_the_layout_of_the_start_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks' fields often have their channels last in memory."""
    monkeypatch.setattr(fast, "descends_on", lambda image: image.dtype == torch.float32)
    ours = level(pictures("slices"), torch.float32, DEVICE)
    start = [torch.zeros_like(side.grid) + 0.02 * torch.randn(side.grid.shape).to(side.grid) for side in ours.sides]
    strange = [field.movedim(1, -1).contiguous().movedim(-1, 1) for field in start]
    assert not strange[0].is_contiguous()
    found = [ours.descend(fields, 2, 0, None) for fields in (start, strange)]
    assert found[0][1] == found[1][1]
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
