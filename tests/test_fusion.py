"""Label fusion against per-voxel references, and the properties that joint label fusion is used for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg.atlases import fusion
from carlreg.atlases.fusion import FLAT, FusionSettings, fuse, joint_weights
from carlreg.errors import InputError

SHAPE = (7, 6, 5)


def random_atlases(count: int, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    """A scan, and images and labels of atlases that have nothing to do with it."""
    return torch.rand(shape), torch.rand(count, *shape), torch.randint(0, 4, (count, *shape))


def test_majority_is_the_most_common_label() -> None:
    scan, images, labels = random_atlases(5)
    fused = fuse(scan, images, labels, "majority")
    for index in itertools.product(*map(range, SHAPE)):
        count = Counter(labels[(slice(None), *index)].tolist())
        most = max(count.values())
        assert fused.labels[index] == min(label for label, n in count.items() if n == most)
        shares = np.array([n / 5 for n in count.values()])
        assert fused.entropy[index] == pytest.approx(-(shares * np.log2(shares)).sum(), abs=1e-5)
        for label in range(4):
            assert fused.probability(label)[index] == pytest.approx(count[label] / 5, abs=1e-3)


def test_ties_go_to_the_lowest_label_and_have_one_bit() -> None:
    labels = torch.stack([torch.full(SHAPE, label) for label in (7, 2, 7, 2)])
    fused = fuse(torch.rand(SHAPE), torch.rand(4, *SHAPE), labels, "majority")
    assert (fused.labels == 2).all()
    assert torch.allclose(fused.entropy, torch.ones(SHAPE))


@pytest.mark.parametrize("method", ["majority", "local", "joint"])
def test_where_all_agree_nothing_changes(method: fusion.Fusion) -> None:
    labels = torch.randint(0, 9, SHAPE).expand(3, *SHAPE)
    fused = fuse(torch.rand(SHAPE), torch.rand(3, *SHAPE), labels, method)
    assert torch.equal(fused.labels, labels[0])
    assert not fused.active.any()
    assert not fused.entropy.any()


def reference_patch(image: np.ndarray, index: tuple[int, ...], radius: int) -> np.ndarray:
    """The patch around a voxel, with mean 0 and variance 1."""
    values = image[tuple(slice(i - radius, i + radius + 1) for i in index)].ravel()
    return (values - values.mean()) / np.sqrt(values.var() + FLAT)


@pytest.mark.parametrize("search", [0, 1])
@pytest.mark.parametrize("shape", [(4, 3, 3), (6, 5)])
def test_joint_fusion_against_a_loop_over_voxels(shape: tuple[int, ...], search: int) -> None:
    """w = (M + αI)⁻¹1 at each voxel, from patches found by an exhaustive search."""
    settings = FusionSettings(patch=1, search=search, alpha=0.05, beta=2.0)
    scan, images, labels = random_atlases(4, shape)
    fused = fuse(scan, images, labels, "joint", settings)
    pad = [(search + 1, search + 1)] * len(shape)  # so that patches of shifted voxels continue the same border
    wide = [np.pad(image.double().numpy(), pad, mode="edge") for image in (scan, *images)]
    wide_labels = [np.pad(one.numpy(), pad, mode="edge") for one in labels]
    shifts = sorted(itertools.product(range(-search, search + 1), repeat=len(shape)), key=lambda o: np.dot(o, o))
    for index in itertools.product(*map(range, shape)):
        at = tuple(i + search + 1 for i in index)
        mine = reference_patch(wide[0], at, 1)
        errors, voters = [], []
        for image, own in zip(wide[1:], wide_labels, strict=True):
            moved = [tuple(np.add(at, shift)) for shift in shifts]
            found = max(moved, key=lambda one: float(reference_patch(image, one, 1) @ mine))
            errors.append(np.abs(reference_patch(image, found, 1) - mine))
            voters.append(int(own[found]))
        matrix = (np.array(errors) @ np.array(errors).T / len(mine)) ** settings.beta
        weights = np.linalg.solve(matrix + settings.alpha * np.eye(4), np.ones(4))
        votes = np.zeros(4)
        np.add.at(votes, voters, weights / weights.sum())
        if not fused.active[index]:
            continue
        votes = votes.clip(min=0) / votes.clip(min=0).sum()
        got = [float(fused.probability(label)[index]) for label in range(4)]
        assert np.allclose(got, votes, atol=2e-3), index


def test_local_weights_are_powers_of_the_local_correlation() -> None:
    """Two atlases vote for 1, a better one for 2: it wins where its correlation to the power outweighs both."""
    scan = torch.rand(12, 12, 12)
    images = torch.stack([torch.rand(12, 12, 12), torch.rand(12, 12, 12), scan + 0.01 * torch.rand(12, 12, 12)])
    labels = torch.stack([torch.full((12, 12, 12), label) for label in (1, 1, 2)])
    assert (fuse(scan, images, labels, "majority").labels == 1).all()
    assert (fuse(scan, images, labels, "local").labels == 2).float().mean() > 0.95
    assert (fuse(scan, images, labels, "joint").labels == 2).float().mean() > 0.95


def test_equal_and_independent_errors_have_equal_weights() -> None:
    errors = torch.randn(1, 5, 100_000, generator=torch.Generator().manual_seed(1)).abs()
    assert torch.allclose(joint_weights(errors, 0.1, 2.0), torch.full((1, 5), 0.2), atol=0.01)


def test_two_copies_of_an_atlas_count_about_as_one() -> None:
    """Without copies the weights are thirds; the copies of the first share what was its own."""
    base = torch.randn(1, 3, 50_000, generator=torch.Generator().manual_seed(2)).clamp(min=0)
    alone = joint_weights(base, 1e-3, 2.0)[0]
    twice = joint_weights(torch.cat([base[:, :1], base], dim=1), 1e-3, 2.0)[0]
    assert twice[0] == pytest.approx(float(twice[1]), abs=1e-4)
    assert float(twice[:2].sum()) == pytest.approx(float(alone[0]), abs=0.02)
    assert torch.allclose(twice[2:], alone[1:], atol=0.02)


def test_weights_sum_to_one() -> None:
    weights = joint_weights(torch.rand(50, 6, 27), 0.1, 2.0)
    assert torch.allclose(weights.sum(dim=1), torch.ones(50), atol=1e-4)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    scan, images, labels = random_atlases(3, (12, 12, 12))
    whole = fuse(scan, images, labels)
    monkeypatch.setattr(fusion, "CHUNK", {"cpu": 1, "cuda": 1})
    parts = fuse(scan, images, labels)
    assert torch.equal(whole.labels, parts.labels)
    assert torch.equal(whole.shares, parts.shares)


def test_joint_fusion_beats_majority_if_most_atlases_make_the_same_mistake() -> None:
    """Three atlases are shifted alike, two are right: the majority is wrong along the edges."""
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 20)] * 3, indexing="ij"))
    truth = (grid.square().sum(0) < 0.4).long()
    noise = torch.rand(5, 20, 20, 20) * 0.05
    labels = torch.stack([truth.roll(3, 0), truth.roll(3, 0), truth.roll(3, 0), truth, truth])
    images, scan = labels + noise, truth + 0.05 * torch.rand(20, 20, 20)

    def right(method: fusion.Fusion) -> float:
        return float((fuse(scan, images, labels, method).labels == truth).float().mean())

    assert right("majority") < 0.95
    assert right("joint") > 0.995


def test_bad_arguments_are_refused() -> None:
    scan, images, labels = random_atlases(2)
    with pytest.raises(InputError, match="unknown fusion 'staple'"):
        fuse(scan, images, labels, "staple")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="shapes"):
        fuse(scan, images[:1], labels)
    with pytest.raises(InputError, match="expected integers"):
        fuse(scan, images, labels.float())
