"""Gather evidence about a registration: the cheap always, the costly within a budget of time."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carlreg.confidence import evidence as measure
from carlreg.confidence.evidence import Evidence
from carlreg.explain import Inside
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import interpolate
from carlreg.geometry.resizing import resize, resize_mask
from carlreg.geometry.transforms import Affine, Transform
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm
from carlreg.preparation import Prepared, PreparedPair

logger = logging.getLogger(__name__)

SHARE = 0.25
"""The share of a registration's time that evidence may take, unless all of it is asked for."""
FINEST = 96
"""Voxels a side, at most, of the grid on which maps are compared."""
PROBE_SHARE = 0.5
"""What one probe of the certificate costs, as a share of the time of the network in both directions."""

Maps = tuple[Transform, Transform]


@dataclass(frozen=True, eq=False)
class Answer:
    """A registration to be judged, in unit coordinates of a prepared pair."""

    pair: PreparedPair
    maps: Maps
    """Φ[moving, fixed] and Φ[fixed, moving]: the result."""
    network: RegistrationAlgorithm | None = None
    """None if no network was involved."""
    first: Maps | None = None
    """The network's own result."""
    losses: Sequence[dict[str, float]] = ()


@dataclass(frozen=True, eq=False)
class Gathered:
    """Evidence, and the maps that some of it comes from: each (*shape) over the fixed image, on a grid of its own."""

    evidence: Evidence
    local: dict[str, Tensor] = field(default_factory=dict)
    features: tuple[Tensor, Tensor] | None = None
    """Pooled features (C,) of the fixed and of the moving image."""


@dataclass(frozen=True)
class Budget:
    """How many seconds may be spent, and what the network took for both directions."""

    seconds: float
    network_seconds: float

    @classmethod
    def of(cls, total: float, network: float, *, full: bool) -> Budget:
        """A share of the time so far, or no limit."""
        return cls(float("inf") if full else SHARE * total, network)


@torch.no_grad()
def gather(answer: Answer, budget: Budget) -> Gathered:
    """Compute evidence about an answer: the cheap in any case; attention, on which verdicts rest most, if there is any
    time, since it takes about a quarter of the network's; and the certificate while time is left."""
    seen = _Seen.of(answer)
    numbers, local = seen.cheap(answer.losses)
    features, began = None, time.perf_counter()
    if answer.network is None or answer.first is None:
        return Gathered(Evidence(**numbers), local)
    first = tuple(phi.to(seen.fixed) for phi in answer.first)
    own = measure.disagreement(first[0], first[1], seen.fixed, seen.size)
    numbers["network_disagreement_mm"] = seen.average(own)
    local["network_disagreement"] = own
    local["moved"] = measure.difference(seen.maps[0], first[0], seen.fixed, seen.moving_size)
    numbers["moved_mm"] = seen.average(local["moved"])
    earlier = interpolate(seen.moving, first[0].on_grid_of(seen.fixed), outside="zeros")
    numbers["network_similarity"] = seen.windows.alike(earlier)

    def affordable() -> bool:
        spent = time.perf_counter() - began
        return spent + PROBE_SHARE * budget.network_seconds <= budget.seconds

    try:
        if _attends(answer.network) and budget.seconds > 0:
            features = _attention(answer, numbers, local)
        given, result = (phi.on_grid_of(answer.pair.fixed.tensor).float() for phi in (first[0], seen.maps[0]))
        found: dict[str, list[Tensor]] = {}
        for name, probe in _probes(answer.pair.moving.tensor, seen.moving_size):
            if affordable():
                found.setdefault(name, []).append(_followed(answer, probe))
        for name, answers in found.items():
            apart = [measure.distance(one - given, seen.moving_size) for one in answers]
            local[name] = seen.resized(torch.stack(apart).mean(0))
            numbers[f"{name}_mm"], numbers[f"{name}_95_mm"] = seen.quantiles(local[name])
        if len(found) > 1:
            every = [given, *(one for answers in found.values() for one in answers)]
            scatter, opinion = measure.opinions(every, result, seen.moving_size)
            local["scatter"], local["opinion"] = seen.resized(scatter), seen.resized(opinion)
            numbers["scatter_mm"] = seen.quantiles(local["scatter"])[0]
            numbers["opinion_mm"] = seen.quantiles(local["opinion"])[0]
    except torch.cuda.OutOfMemoryError:
        logger.warning("the GPU has too little memory for all evidence about the result: some of it is left out")
    return Gathered(Evidence(**numbers), local, features)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A pair on a grid of at most `FINEST` voxels a side, and the result on its device."""

    fixed: Tensor
    moving: Tensor
    maps: tuple[Transform, ...]
    inside: Tensor
    size: list[float]
    moving_size: list[float]

    @classmethod
    def of(cls, answer: Answer) -> _Seen:
        pair = answer.pair
        fixed, mask = _at_most(pair.fixed)
        moving, _ = _at_most(pair.moving)
        maps = tuple(phi.to(fixed) for phi in answer.maps)
        return cls(fixed, moving, maps, measure.foreground(fixed, mask), _size(pair.fixed), _size(pair.moving))

    def cheap(self, losses: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Evidence that takes no network."""
        phi, psi = self.maps
        warped = interpolate(self.moving, phi.on_grid_of(self.fixed), outside="zeros")
        apart = measure.disagreement(phi, psi, self.fixed, self.size)
        alike = self.windows.similarity(warped)
        before = self.windows.alike(self.moving)
        drift = self.windows.drift(warped, self.size)
        left = measure.residual(warped, self.fixed, self.size)
        bent, stretched, strain = measure.deformation(phi, self.fixed, self.inside, self.size, self.moving_size)
        covered, overlap = measure.overlap(warped, self.inside)
        scale = 1.0
        for here, there in zip(self.size, self.moving_size, strict=True):
            scale *= max(there, 1e-6) / max(here, 1e-6)
        folds, extreme, volume = measure.volume_change(phi, self.fixed, self.inside, scale)
        numbers = {
            "extent_mm": measure.extent(self.inside, self.size),
            "disagreement_mm": self.average(apart),
            "residual_mm": self.quantiles(left)[0],
            "deformation_mm": self.average(bent),
            "similarity": alike.mean,
            "similarity_excess": alike.excess,
            "similarity_gain": (alike.mean - before) / max(1 - before, 1e-6),
            "information_excess": self.windows.information(warped),
            "drift_mm": self.windows.median(drift),
            "strain": strain,
            "agreement": alike.agreement,
            "covered": covered,
            "overlap": overlap,
            "coarse_folds_percent": folds,
            "extreme_percent": extreme,
            "volume": volume,
            "gain": measure.optimisation_gain(losses),
        }
        local = {"disagreement": apart, "residual": left, "deformation": bent, "drift": drift}
        local |= {"similarity": alike.squared, "excess": alike.beyond}
        local["stretch"] = stretched * numbers["extent_mm"]  # in mm over the extent, like the rest
        return numbers, local | {"flatness": measure.flatness(self.fixed, self.size)}

    @functools.cached_property
    def windows(self) -> measure.Windows:
        return measure.Windows(self.fixed, self.inside)

    def resized(self, values: Tensor) -> Tensor:
        """A map (*shape) on this grid."""
        return resize(values[None, None], self.fixed.shape[2:])[0, 0]

    def average(self, values: Tensor) -> float:
        return float(values[self.inside].mean())

    def quantiles(self, values: Tensor) -> tuple[float, float]:
        """The median and the 95th percentile over the foreground."""
        counted = values[self.inside].float().sort().values
        return float(counted[len(counted) // 2]), float(counted[int(0.95 * (len(counted) - 1))])


def _at_most(one: Prepared) -> tuple[Tensor, Tensor | None]:
    """What the network sees, and the mask, on at most `FINEST` voxels a side."""
    shape = [min(n, FINEST) for n in one.tensor.shape[2:]]
    return resize(one.tensor, shape), None if one.mask is None else resize_mask(one.mask, shape)


def _size(one: Prepared) -> list[float]:
    """Millimetres from the first to the last voxel centre."""
    shape = one.tensor.shape[2:]
    return [mm * (n - 1) for mm, n in zip(one.spacing(shape), shape, strict=True)]


def _attends(network: RegistrationAlgorithm) -> bool:
    return any(isinstance(module, CoordinateAttention) for module in network.modules())


def _attention(answer: Answer, numbers: dict[str, float], local: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Add the spread and the entropy of attention, and how features match, and return pooled features."""
    assert answer.network is not None
    fixed, moving = answer.pair
    size, phi = _size(moving), answer.maps[0]
    with mixed_precision(fixed.tensor.device):
        inside = Inside.of(answer.network, moving.tensor, fixed.tensor)
        mean, covariance = inside.moments()
    spread = measure.attention_spread(covariance, size)
    apart = measure.distance(mean[None] - phi.to(inside.fixed).on_grid_of(inside.fixed), size)
    here, there = measure.foreground(inside.fixed), measure.foreground(inside.moving)
    alike, drift, excess = measure.feature_match(inside, here, phi.to(inside.fixed), size)
    local |= {"spread": spread, "attention": apart, "likeness": alike, "feature_drift": drift}
    numbers["feature_excess"], numbers["feature_drift_mm"] = excess, float(drift[here].median())
    numbers["spread_mm"] = float(spread[here].mean())
    numbers["attention_mm"] = float(apart[here].median())
    numbers["entropy"], numbers["surprise"] = measure.attention_entropy(inside, here, phi.to(inside.fixed))
    keys = inside.xi.crop(inside.moving_features)
    return measure.pooled_features(inside.fixed_features, here), measure.pooled_features(keys, there)


def _probes(moving: Tensor, size: Sequence[float]) -> list[tuple[str, Affine]]:
    """Known maps of the moving image that the answer must follow, the most telling first."""
    return [
        ("turn", measure.turn_probe(moving, size)),
        ("shift", measure.shift_probe(moving)),
        ("turn", measure.turn_probe(moving, size, (-1, 1, -1))),
        ("shift", measure.shift_probe(moving, -1)),
    ]


def _followed(answer: Answer, probe: Affine) -> Tensor:
    assert answer.network is not None
    moving, fixed = answer.pair.moving.tensor, answer.pair.fixed.tensor
    with mixed_precision(fixed.device):
        return measure.followed(answer.network, moving, fixed, probe)
