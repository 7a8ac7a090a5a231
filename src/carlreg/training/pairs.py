"""Pairs of prepared images, drawn at random and augmented for training.

Each image is interpolated once, through one affine map and one deformation, and its labels at the same points.
Rotations inside the loss are separate: `Stage(rotate=True)` trains through `Augmented`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.grids import interpolate, voxel_points, voxel_size
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine
from carlreg.synthesis.contrast import random_colours, random_contrast, render
from carlreg.synthesis.waves import Waves
from carlreg.training.batches import Batch
from carlreg.training.cache import Prepared
from carlreg.training.cohort import Cohort, DatasetError
from carlreg.training.distributed import Team

STRUCTURES = 16
"""Maximum number of structures of a pair that one step learns from; each needs a map of the image's size in memory."""
SLOPE, WAVELENGTHS, WAVES = 0.6, (0.25, 1.2), 8
"""Random deformations: the largest slope, the lengths of the waves in sides of the image, and their number."""
ROOM, LEAST_KEPT, THICKEST = 0.8, 0.55, 8.0
"""Largest margin in sides of the scan, least part of a scan that is kept, and thickest slices in voxels."""


@dataclass(frozen=True, eq=False)
class Views:
    """How each image of a batch shows its scan: where it samples it, and in what quality the network sees it."""

    affine: Affine
    """From the unit coordinates of the image to those of the scan, or of `waves`, which are applied afterwards."""
    waves: Waves | None
    empty: Tensor  # (B,): whether there are zeros around the scan, which else continues by its border
    changed: Tensor  # (B,): whether the network sees it in a random contrast
    thickness: Tensor  # (B, D): thickness of the slices that the network sees along each axis, in voxels

    def __getitem__(self, index: Tensor) -> Views:
        w = self.waves
        waves = w and Waves(w.amplitude[index], w.frequency[index], w.phase[index])
        rest = (part[index] for part in (self.empty, self.changed, self.thickness))
        return Views(Affine(self.affine.matrix[index]), waves, *rest)

    def sample(self, scans: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Resample scans (B, C, *shape), and their label maps, on their own grid. Labels are 0 around the scan."""
        points = self.affine.to(scans)(voxel_points(scans))
        points = points if self.waves is None else self.waves(points)
        images = interpolate(scans, points)
        if self.empty.any():
            half = voxel_size(scans.shape[2:], points) / 2
            inside = ((points >= -half) & (points <= 1 + half)).all(dim=-1)
            images = images * (inside | ~self.empty.to(inside.device).reshape(-1, *[1] * (inside.dim() - 1)))[:, None]
        return images, None if labels is None else interpolate(labels, points, mode="nearest", outside="zeros")

    def in_thick_slices(self, images: Tensor) -> Tensor:
        """Resample some images to fewer slices, and back."""
        shape = images.shape[2:]
        for number in (self.thickness > 1).any(dim=1).nonzero()[:, 0].tolist():
            fewer = [max(2, round(n / thick)) for n, thick in zip(shape, self.thickness[number].tolist(), strict=True)]
            images[number] = resize(resize(images[number, None], fewer), shape)[0]
        return images


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a pair before the network sees it. A share is a probability from 0 to 1.

    >>> images, labels = Augmentation(deform=0.5).draw(len(moving), 3, generator).sample(torch.cat([moving, fixed]))
    """

    affine: float = 0.05
    """Standard deviation of the noise on each entry of an affine map in coordinates from −1 to 1; independent for each
    image."""
    flips: bool = False
    """Mirror each axis with probability ½, both images alike."""
    permutations: bool = False
    """Permute the axes at random, both images alike. Sides of different lengths are stretched."""
    mirror: bool = False
    """Mirror the first axis, left and right, with probability ½, both images alike, and no other axis."""
    contrast: float = 0.0
    """Share of images that the network sees in a random contrast, while the loss compares the original ones."""
    deform: float = 0.0
    """Share of images with a random smooth deformation."""
    margins: float = 0.0
    """Share of pairs whose scans lie at random places in a larger, empty image."""
    crop: float = 0.0
    """Share of images, of those without margins, with missing slices at the ends of the last axis."""
    thick_slices: float = 0.0
    """Share of images that the network sees with thick slices along one axis, while the loss compares the original
    ones."""

    @property
    def has_targets(self) -> bool:
        """Whether the loss compares other images than those that the network sees."""
        return self.contrast > 0 or self.thick_slices > 0

    def draw(self, pairs: int, dim: int, generator: torch.Generator) -> Views:
        """Draw the views of a batch: those of the moving images, then those of the fixed ones."""
        count = 2 * pairs

        def random(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator)

        common = torch.eye(dim).repeat(pairs, 1, 1)
        if self.permutations:
            common = torch.eye(dim)[random(pairs, dim).argsort(dim=1)]
        if axes := 1 if self.mirror else dim * self.flips:
            common[:, :axes] *= 1 - 2 * torch.randint(2, (pairs, axes, 1), generator=generator)
        noise = [self.affine * torch.randn(pairs, *shape, generator=generator) for shape in 2 * ((dim, dim), (dim,))]
        linear, shift = torch.eye(dim) + torch.cat(noise[::2]), 0.5 * torch.cat(noise[1::2])
        scale = torch.where(random(pairs, 1) < self.margins, 1 + ROOM * random(pairs, 1), 1).repeat(2, dim)
        empty = scale[:, 0] > 1
        kept = torch.where((random(count) < self.crop) & ~empty, 1 - (1 - LEAST_KEPT) * random(count), 1)
        scale[:, -1] *= kept
        linear, shift = framed(linear, shift, scale, generator)
        waves = None
        if self.deform:
            waves = deformations((random(count) < self.deform) * SLOPE * random(count), dim, generator)
        along = F.one_hot(torch.randint(dim, (count,), generator=generator), dim)
        thicker = (random(count) < self.thick_slices) * (1 + (THICKEST - 2) * random(count))
        changed = random(count) < self.contrast
        affine = about_centre(linear @ common.repeat(2, 1, 1), shift)
        return Views(affine, waves, empty, changed, 1 + along * thicker[:, None])


def framed(linear: Tensor, shift: Tensor, scale: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The linear part and shift of maps to a field of view that is `scale` times as large, (B, D), at a random
    position: some of the scan where it is below 1, and more where it is above."""
    return linear * scale[:, None], shift + (scale - 1) * (torch.rand(shift.shape, generator=generator) - 0.5)


def about_centre(linear: Tensor, shift: Tensor) -> Affine:
    """x ↦ c + A (x − c) + b with the centre c of the unit cube."""
    centre = torch.full(shift.shape, 0.5)
    return Affine.from_parts(linear, centre - (linear @ centre[..., None])[..., 0] + shift)


def deformations(slope: Tensor, dim: int, generator: torch.Generator) -> Waves:
    """Random smooth deformations with these largest slopes, (B,)."""
    return Waves.random(len(slope), dim, wavelength=WAVELENGTHS, slope=slope, generator=generator, count=WAVES)


def intensities(images: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prepared images (1, *grid) as one batch (B, 1, *grid), from 0 to 1."""
    return torch.stack(list(images)).to(device, non_blocking=True).float() / 255


class TrainingPairs:
    """Draw batches of augmented pairs; if `labelled`, with structures that both images show, up to 16 chosen at random.

    Two images of different modality are compared by renderings of these structures. A `map_share` of the pairs are two
    of the label `maps`: the network sees each in a contrast of its own, and the loss compares them in the same one.

    If several processes train together, each makes its own part of the batch. Random numbers are drawn for the joint
    batch, so that the parts belong together whatever the number of processes.

    >>> train(model, TrainingPairs(cohort, prepared, batch=4, device=device), stages, out="run")
    """

    def __init__(
        self,
        cohort: Cohort,
        prepared: Sequence[Prepared],
        *,
        batch: int,
        device: torch.device,
        augmentation: Augmentation | None = None,
        labelled: bool = False,
        maps: Sequence[Prepared] = (),
        map_share: float = 0.0,
    ) -> None:
        if batch < 1:
            raise InputError(f"the batch is {batch}; expected 1 or more")
        self.cohort, self.batch, self.device, self.labelled = cohort, batch, device, labelled
        self.augmentation = augmentation or Augmentation()
        self.scans, self.maps, self.map_share = len(prepared), len(maps), map_share
        self.images = _on_device([case.image for case in (*prepared, *maps)], device)
        self.dim = prepared[0].image.dim() - 1
        mixed = check_modalities(cohort, prepared)
        self.has_targets = self.augmentation.has_targets or mixed or bool(maps)
        self.labels: Sequence[Tensor] = ()
        if labelled or mixed or maps:
            known = [torch.zeros_like(case.image) if case.labels is None else case.labels for case in prepared]
            shown = [case.labels.long() for case in maps if case.labels is not None]
            names = torch.tensor(sorted(set[int]().union(*map(_values, shown))))
            known += [(labels != 0) * (torch.searchsorted(names, labels) + 1).int() for labels in shown]  # from 0 to K
            self.colours = len(names)
            self.values = [_values(labels) for labels in known]
            self.labels = _on_device(known, device)

    def __call__(self, generator: torch.Generator) -> Batch:
        chosen = [self._choose(generator) for _ in range(self.batch)]  # moving, fixed
        views = self.augmentation.draw(self.batch, self.dim, generator)
        seeds = torch.randint(2**62, (self.batch,), generator=generator)
        mine = Team.current().part(torch.arange(self.batch))
        both = torch.cat([mine, mine + self.batch])
        cases, views = torch.tensor(chosen).T.flatten()[both].tolist(), views[both]
        scans, known = intensities([self.images[i] for i in cases], self.device), None
        if self.labels:
            common = torch.stack([self._common_labels(*pair, generator) for pair in chosen])
            wanted = common[mine].repeat(2, 1).to(self.device).reshape(-1, STRUCTURES, *[1] * self.dim)
            known = torch.stack([self.labels[i] for i in cases]).to(self.device).float()
        targets, labels = views.sample(scans, known)
        structures = None if labels is None else ((labels == wanted) & (wanted > 0)).byte()
        inputs = targets
        if self.has_targets:
            inputs = targets.clone()
            for number, seed in enumerate(seeds[mine].tolist()):
                pair = [number, number + len(mine)]
                own = torch.Generator(self.device).manual_seed(seed)
                if cases[number] >= self.scans and labels is not None:
                    inputs[pair], targets[pair] = self._rendered(labels[pair], own)
                elif changed := [i for i in pair if views.changed[i]]:
                    inputs[changed] = random_contrast(targets[changed], own)
                if structures is not None and self._differ(*(cases[i] for i in pair)):
                    targets[pair] = _shared_structures(structures[pair], own)
            inputs = views.in_thick_slices(inputs)
        parts = (inputs, structures if self.labelled else None, targets if self.has_targets else None)
        return Batch(*(half for part in parts for half in ((None, None) if part is None else part.chunk(2))))  # type: ignore[arg-type]

    def _choose(self, generator: torch.Generator) -> tuple[int, int]:
        if self.maps and torch.rand((), generator=generator) < self.map_share:
            first, second = (torch.randperm(self.maps, generator=generator)[:2] + self.scans).tolist()
            return first, second
        if self.cohort.pairs is not None:
            pair = self.cohort.pairs[int(torch.randint(len(self.cohort.pairs), (), generator=generator))]
            return pair.moving, pair.fixed
        while True:
            first, second = torch.randperm(self.scans, generator=generator)[:2].tolist()
            if not self._differ(first, second) or self.values[first] & self.values[second]:
                return first, second

    def _differ(self, first: int, second: int) -> bool:
        """Whether two scans are of different modality."""
        return first < self.scans and self.cohort.differ(first, second)

    def _common_labels(self, moving: int, fixed: int, generator: torch.Generator) -> Tensor:
        """Labels that both images have, (STRUCTURES,), padded with 0."""
        common = sorted(self.values[moving] & self.values[fixed])
        order = torch.randperm(len(common), generator=generator)[:STRUCTURES].tolist()
        return torch.tensor([common[i] for i in order] + [0] * (STRUCTURES - len(order)))

    def _rendered(self, maps: Tensor, own: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two label maps (2, 1, *grid), each in a random contrast, and both in the same one without shading."""
        seen = render(maps, own, colours=random_colours(2, self.colours, own))
        return seen, render(maps, own, colours=random_colours(1, self.colours, own).expand(2, -1), plain=True)


def check_modalities(cohort: Cohort, prepared: Sequence[Prepared]) -> bool:
    """Whether there are images of different modality. Those of a pair must share a label; if any two images may form a
    pair, some two must be comparable."""
    if len({case.modality for case in cohort.cases}) < 2:
        return False
    values = [set[int]() if case.labels is None else _values(case.labels) for case in prepared]
    pairs = [(pair.moving, pair.fixed) for pair in cohort.some_pairs(most=10**9)]
    apart = [(m, f) for m, f in pairs if cohort.differ(m, f) and not values[m] & values[f]]
    if apart and (cohort.pairs is not None or len(apart) == len(pairs)):
        moving, fixed = (cohort.cases[i].image for i in apart[0])
        raise DatasetError(
            f"{moving} and {fixed} are of different modality and share no label; expected label maps of both, with the "
            "same structures"
        )
    return True


def _values(labels: Tensor) -> set[int]:
    return set(labels.unique().tolist()) - {0}


def _shared_structures(structures: Tensor, own: torch.Generator) -> Tensor:
    """The structures of two images (2, STRUCTURES, *grid), rendered in the same random intensities on black."""
    numbers = torch.arange(1, STRUCTURES + 1, device=structures.device).byte()
    labels = (structures.movedim(1, -1) * numbers).sum(-1)[:, None]
    colours = 0.3 + 0.7 * random_colours(1, STRUCTURES, own)
    colours[:, 0] = 0.0
    return render(labels, own, colours=colours.expand(2, -1), plain=True)


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The tensors in GPU memory if they need at most half of what is free, otherwise where they are: on disk."""
    if device.type != "cuda" or sum(tensor.nbytes for tensor in tensors) > torch.cuda.mem_get_info(device)[0] / 2:
        return tensors
    return [tensor.to(device) for tensor in tensors]
