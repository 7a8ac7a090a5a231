"""The procedural torso and random anatomy: exact correspondences, plausible images, and full reproducibility."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from carlreg.files.images import Image, map_points
from carlreg.geometry.grids import Grid
from carlreg.preparation import preprocess
from carlreg.synthesis import LABELS, PHASES, Patient, Scan, correspondence, patient, random_anatomy
from carlreg.synthesis.waves import Waves

COARSE = ((48, 40, 72), 8.0)  # the whole torso, 384 × 320 × 576 mm


def scan(who: Patient, **options: object) -> Scan:
    shape, spacing = COARSE
    settings = {"centre": (0, 0, 60) if who.dim == 3 else (0, 0), "noise": 0.0} | options
    return who.scan(shape[: who.dim], spacing, **settings)  # type: ignore[arg-type]


def inner_points(who: Patient, count: int, seed: int = 0) -> np.ndarray:
    """World points of a patient that lie in the middle of the canonical body."""
    box = np.array([130, 85, 150])[: who.dim]
    return who.from_canonical(np.random.default_rng(seed).uniform(-box, box, (count, who.dim)))


def labels_at(image: Scan, points: np.ndarray) -> np.ndarray:
    index = np.rint(map_points(np.linalg.inv(image.affine), points)).astype(int)
    inside = ((index >= 0) & (index < image.labels.shape)).all(axis=-1)
    assert inside.mean() > 0.95
    values = image.labels[tuple(np.clip(index, 0, np.array(image.labels.shape) - 1).T)].astype(int)
    return np.where(inside, values, -1)


@pytest.mark.parametrize("dim", [2, 3])
def test_there_and_back(dim: int) -> None:
    for seed in range(3):
        who = patient(seed, dim=dim)
        points = np.random.default_rng(seed).uniform(-300, 300, (500, dim))
        assert np.abs(who.from_canonical(who.to_canonical(points)) - points).max() < 1e-6
        assert np.abs(who.to_canonical(who.from_canonical(points)) - points).max() < 1e-6
        moved = np.linalg.norm(who.to_canonical(points) - points, axis=-1)
        assert 5 < moved.mean() < 60  # patients do differ


@pytest.mark.parametrize("dim", [2, 3])
def test_determinants_are_positive(dim: int) -> None:
    """By central differences at many points, with a larger variation than the default."""
    for seed in range(4):
        who = patient(seed, dim=dim, variation=1.5)
        points = np.random.default_rng(seed).uniform(-300, 300, (4000, dim))
        columns = [
            (who.to_canonical(points + 1e-3 * step) - who.to_canonical(points - 1e-3 * step)) / 2e-3
            for step in np.eye(dim)
        ]
        assert np.linalg.det(np.stack(columns, axis=-1)).min() > 0.05


@pytest.mark.parametrize("dim", [2, 3])
def test_correspondences_are_true(dim: int) -> None:
    """Where all of one voxel's neighbourhood has one label, the corresponding voxel of another patient has it too."""
    first = patient(1, dim=dim, variation=1.3, phase="portal")
    second = patient(2, dim=dim, variation=1.3, phase="native")
    a, b = (who.scan((128, 104, 144)[:dim], 3.0, centre=(0, 0, 30)[:dim], noise=0.0) for who in (first, second))
    points = inner_points(first, 20000)
    offsets = 6.0 * np.concatenate([np.zeros((1, dim)), np.eye(dim), -np.eye(dim)])
    around = np.stack([labels_at(a, points + offset) for offset in offsets])
    certain = (around == around[0]).all(axis=0) & (around[0] > 0)
    assert certain.sum() > 1000
    there = correspondence(first, second)(points[certain])
    found = labels_at(b, there)
    assert (found == around[0][certain])[found >= 0].mean() > 0.98
    by_chance = labels_at(b, points[certain])
    assert (by_chance == around[0][certain]).mean() < 0.9  # without the map they do not agree
    back = correspondence(second, first)(there)
    assert np.abs(back - points[certain]).max() < 1e-6


@pytest.mark.parametrize("phase", PHASES)
def test_every_organ_is_there(phase: str) -> None:
    """Volumes in millilitres and mean Hounsfield units, in generous bounds of what adults have."""
    who = patient(0, variation=0.0, phase=phase)  # type: ignore[arg-type]
    image = who.scan((90, 64, 144), 4.0, centre=(0, 0, 60), noise=0.0)
    bounds = {
        "spleen": (80, 350, 30, 150),
        "right kidney": (90, 250, 20, 190),
        "left kidney": (90, 250, 20, 190),
        "gallbladder": (15, 80, 0, 40),
        "liver": (900, 2200, 40, 140),
        "stomach": (150, 700, -500, 60),
        "aorta": (80, 300, 25, 340),
        "vena cava": (60, 250, 25, 160),
        "pancreas": (30, 140, 25, 120),
        "spine": (400, 1400, 180, 450),
        "ribs": (150, 800, 300, 800),
        "right lung": (1000, 4500, -900, -700),
        "left lung": (1000, 4500, -900, -700),
        "heart": (300, 1000, 30, 250),
        "colon": (250, 1200, -700, 60),
    }
    assert set(bounds) == set(LABELS)
    for name, (least, most, dark, bright) in bounds.items():
        mask = image.labels == LABELS[name]
        assert least < mask.sum() * 0.064 < most, name
        assert dark < image.data[mask].mean() < bright, name
    # On the usual sides: x is to the left, y to the back, z to the head.
    index = {name: np.argwhere(image.labels == label).mean(axis=0) for name, label in LABELS.items()}
    centre = {name: map_points(image.affine, value) for name, value in index.items()}
    assert centre["liver"][0] < -20 < 20 < centre["spleen"][0]
    assert centre["right kidney"][0] < centre["vena cava"][0] < centre["aorta"][0] < centre["left kidney"][0]
    assert centre["spine"][1] > centre["aorta"][1] > centre["stomach"][1]
    assert centre["heart"][2] > centre["liver"][2] > centre["colon"][2]


def test_it_is_taken_for_a_ct() -> None:
    image = scan(patient(4), noise=15.0)
    assert image.data.dtype == np.int16
    assert image.data.min() >= -1024
    _, done = preprocess(Image(image.data, image.affine))
    assert done.kind == "CT"


@pytest.mark.parametrize("dim", [2, 3])
def test_the_field_of_view_moves_nothing(dim: int) -> None:
    """The same world point has the same value, whatever else is in the picture."""
    who = patient(5, dim=dim)
    whole = who.scan((56, 48, 64)[:dim], 6.0, noise=0.0)
    offset = np.array([5, 9, 17])[:dim]
    shape = np.array([30, 27, 31])[:dim]
    centre = map_points(whole.affine, offset + (shape - 1) / 2)
    part = who.scan(shape.tolist(), 6.0, centre=centre.tolist(), noise=0.0)
    assert np.allclose(map_points(part.affine, np.zeros(dim)), map_points(whole.affine, offset))
    window = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    assert np.abs(part.data.astype(int) - whole.data[window]).max() <= 1  # rounded to whole numbers
    assert (part.labels == whole.labels[window]).mean() > 0.999
    assert len(np.unique(part.labels)) > 4


def test_a_patient_who_lies_elsewhere_looks_the_same() -> None:
    who = patient(6)
    by = np.array([12.0, -6.0, 48.0])
    elsewhere = who.moved(by)
    points = inner_points(who, 100)
    assert np.abs(correspondence(who, elsewhere)(points) - (points + by)).max() < 1e-6
    here = who.scan((30, 28, 26), 6.0, noise=0.0)
    there = elsewhere.scan((30, 28, 26), 6.0, centre=by.tolist(), noise=0.0)
    assert np.abs(here.data.astype(int) - there.data).max() <= 1
    with pytest.raises(ValueError, match=r"by is \(1, 2\); expected 3 numbers"):
        who.moved((1, 2))


def test_two_dimensions_are_a_slice_of_three() -> None:
    flat, solid = patient(0, dim=2, variation=0.0, phase="portal"), patient(0, variation=0.0, phase="portal")
    solid = Patient(solid.linear, solid.shift, solid.waves, solid.phase, flat.texture)
    assert flat.level is not None
    picture = flat.scan((64, 56), 5.0, noise=0.0)
    volume = solid.scan((64, 56, 8), 5.0, centre=(0, 0, flat.level + 2.5), noise=0.0)  # slice 3 lies at the level
    assert picture.data.ndim == 2
    assert np.abs(picture.data.astype(int) - volume.data[:, :, 3]).max() <= 1
    assert np.array_equal(picture.labels, volume.labels[:, :, 3])


def test_seeds_decide_everything() -> None:
    first, again, other = scan(patient(7), noise=12.0), scan(patient(7), noise=12.0), scan(patient(8), noise=12.0)
    assert np.array_equal(first.data, again.data)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.labels, other.labels)
    noisy = scan(patient(7), noise=12.0, seed=1)
    assert np.array_equal(first.labels, noisy.labels)
    air = first.labels == 0
    difference = (first.data.astype(float) - noisy.data)[air & (first.data > -900)]
    assert difference.std() == pytest.approx(12 * math.sqrt(2), rel=0.1)


def test_waves_are_inverted() -> None:
    waves = Waves.random(
        3, 3, wavelength=(0.3, 1.0), slope=0.9, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    points = torch.rand(3, 50, 3, dtype=torch.float64)
    assert (waves(waves.inverse(points)) - points).abs().max() < 1e-7
    assert (waves(points) - points).abs().max() > 0.01
    bound = (waves.amplitude.norm(dim=-1) * waves.frequency.norm(dim=-1)).sum(dim=-1)
    assert torch.allclose(bound, torch.tensor(0.9, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"slope is 1.2; expected less than 1"):
        Waves.random(1, 2, wavelength=(0.3, 1.0), slope=1.2, generator=torch.Generator())


def test_a_small_body_is_seen_whole() -> None:
    """All but a little of it lies in the ball that stays in the image however it is turned; of a large one, less."""
    away = (Grid.of((32, 32, 32)).points() - 0.5).norm(dim=-1)

    def outside(**options: object) -> float:
        pairs = random_anatomy((32, 32, 32), batch=6, generator=torch.Generator().manual_seed(0), **options)
        body = torch.cat([pairs.moving_labels, pairs.fixed_labels])[:, 0] > 0
        assert body.float().mean() > 0.1
        return float(body[:, away > 0.5].sum() / body.sum())

    assert outside(body=(0.25, 0.42), shift=0.05) < 0.01
    assert outside() > 0.1


@pytest.mark.parametrize("shape", [(40, 36), (28, 32, 24)])
def test_random_pairs(shape: tuple[int, ...]) -> None:
    pairs = random_anatomy(shape, batch=6, generator=torch.Generator().manual_seed(3), same_contrast=1.0)
    again = random_anatomy(shape, batch=6, generator=torch.Generator().manual_seed(3), same_contrast=1.0)
    for name in ("moving", "fixed"):
        image, labels = getattr(pairs, name), getattr(pairs, f"{name}_labels")
        assert image.shape == labels.shape == (6, 1, *shape)
        assert image.dtype == torch.float32
        assert image.min() >= 0
        assert image.max() <= 1
        assert image.flatten(1).std(dim=1).min() > 0.03
        assert torch.equal(image, getattr(again, name))
        for item in labels:
            assert len(item.unique()) >= 4
    # The images of a pair show the same solids: labels seen in one are mostly seen in the other.
    for a, b in zip(pairs.moving_labels, pairs.fixed_labels, strict=True):
        first, second = set(a.unique().tolist()), set(b.unique().tolist())
        assert len(first & second) >= 0.4 * len(first | second)
        assert not torch.equal(a, b)
    assert not torch.equal(pairs.moving[0], pairs.moving[1])


def test_pairs_that_are_not_moved_show_the_same() -> None:
    def agreement(**options: float) -> float:
        pairs = random_anatomy((64, 64), batch=4, generator=torch.Generator().manual_seed(1), **options)
        return float((pairs.moving_labels == pairs.fixed_labels).float().mean())

    assert agreement(slope=0.0, affine=0.0, shift=0.0) == 1
    for name, value in (("slope", 0.6), ("affine", 0.1), ("shift", 0.15)):
        assert agreement(**{"slope": 0.0, "affine": 0.0, "shift": 0.0, name: value}) < 0.95, name


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="dim is 4; expected 2 or 3"):
        patient(0, dim=4)
    with pytest.raises(ValueError, match="unknown phase 'late'; expected one of native, arterial, portal"):
        patient(0, phase="late")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variation is 3; expected 0 to"):
        patient(0, variation=3)
    with pytest.raises(ValueError, match=r"shape is \(8, 8\); expected 3 sides"):
        patient(0).scan((8, 8))
    with pytest.raises(ValueError, match="expected positive numbers and a centre of 3"):
        patient(0).scan((8, 8, 8), spacing=-1.0)
    with pytest.raises(ValueError, match=r"points have shape \(5, 2\); expected \(..., 3\)"):
        patient(0).to_canonical(np.zeros((5, 2)))
    with pytest.raises(ValueError, match="expected the same level"):
        correspondence(patient(0, dim=2), patient(0, dim=2, level=40.0))
    with pytest.raises(ValueError, match=r"shape is \(4, 4, 4\); expected 2 or 3 sides of at least 8"):
        random_anatomy((4, 4, 4), generator=torch.Generator())
    with pytest.raises(ValueError, match="batch is 0"):
        random_anatomy((8, 8), 0, generator=torch.Generator())
