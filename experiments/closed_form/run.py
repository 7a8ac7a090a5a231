"""Compare Ξ_F, a network without training, with the closed-form registration M⁻¹ ∘ F (Appendix, Implementing the
diffeomorphism-to-diffeomorphism case).

    python experiments/closed_form/run.py

The 1-D pair is the paper's, with the solution (2/π)·arccos(x + 0.07 sin 3πx). The 2-D pair consists of two smooth
diffeomorphisms of the square; its solution inverts one of them numerically. Writes results.json and figure.png beside
this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import ClosedFormXi, Transform, compose, invert
from carlreg.geometry.grids import Grid

HERE = Path(__file__).parent

# cos(πx/2) is flat at x = 0, where its value is 1. There a Gaussian of width b in the values has width ~√b in x and is
# cut in half by the end of the image, so the error at the last voxel of the fixed image is
# Γ(½)/Γ(¼)·(128/π⁴)^¼·√b = 0.52·√b for any number of voxels: an error below 0.01 needs b < 3.6e-4.
BANDWIDTH_1D = 2e-4
# At x = 1, where the moving image is steepest, b should be at least half the step between neighbouring voxels,
# (π/2)/(n − 1): with n = 4096 it is 0.52 steps.
VOXELS_1D = 4096

SIDE_2D = 64
BANDWIDTH_2D = 0.6  # in voxels
MARGIN_2D = 4  # voxels from the border; further inside, the border does not cut off any attention

TOLERANCE = 0.01
SEED = 0  # of ClosedFormXi's random frequencies; fixed inside the class


@dataclass(frozen=True)
class Solution1D:
    """The pair, both maps and their distance, one value per voxel, in unit coordinates."""

    points: Tensor
    moving: Tensor
    fixed: Tensor
    network: Tensor
    analytic: Tensor

    @property
    def error(self) -> Tensor:
        return (self.network - self.analytic).abs()


def solve_1d(voxels: int = VOXELS_1D, bandwidth: float = BANDWIDTH_1D) -> Solution1D:
    """Ξ_F and the analytic map for the paper's pair."""
    x = Grid.of((voxels,)).points(torch.float64)[:, 0]
    moving = torch.cos(math.pi / 2 * x)
    # Increases from 0 to 1 (its slope is at least 1 − 0.21π), so it leaves [0, 1] only by rounding.
    fixed = x + 0.07 * torch.sin(3 * math.pi * x)
    image = fixed[None, None]
    network = ClosedFormXi(1, bandwidth=bandwidth)(moving[None, None], image).on_grid_of(image)[0, :, 0]
    return Solution1D(x, moving, fixed, network, 2 / math.pi * torch.arccos(fixed.clamp(0, 1)))


@dataclass(frozen=True)
class Bumps(Transform):
    """x ↦ x + (a sin πx₀ sin πx₁, b sin πx₀ sin 2πx₁): a diffeomorphism of the square that fixes its boundary."""

    a: float
    b: float

    def __call__(self, points: Tensor) -> Tensor:
        x, y = (math.pi * points).unbind(-1)
        return points + torch.stack([self.a * x.sin() * y.sin(), self.b * x.sin() * (2 * y).sin()], dim=-1)


def solve_2d(side: int = SIDE_2D, bandwidth: float = BANDWIDTH_2D) -> tuple[Tensor, Tensor]:
    """Distance in voxels, (side, side), between Ξ_F's map and M⁻¹ ∘ F, and between M⁻¹ ∘ F and the identity."""
    moving, fixed = Bumps(0.10, -0.06), Bumps(-0.08, 0.05)
    points = Grid.of((side, side)).points(torch.float64)[None]
    as_image = points.movedim(-1, 1)
    xi = ClosedFormXi(2, bandwidth=bandwidth / (side - 1))
    network = xi(moving(points).movedim(-1, 1), fixed(points).movedim(-1, 1)).on_grid_of(as_image)
    exact = compose(invert(moving, like=as_image), fixed)(points)
    distance, moved = ((side - 1) * (exact - other).norm(dim=-1)[0] for other in (network, points))
    return distance, moved


def provenance() -> dict[str, Any]:
    """The code and the machine that produced these numbers."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "run.py", ":/src")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "seed": SEED,
    }


def draw(solution: Solution1D, path: Path) -> None:
    """Draw the paper's figure: the images, the two maps, and the distance between the maps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 12,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
    x = solution.points.numpy()
    with plt.rc_context(style):
        figure, (images, maps, errors) = plt.subplots(
            1, 3, figsize=(14, 4.4), width_ratios=(1, 1, 0.75), layout="constrained"
        )
        images.plot(x, solution.moving, color="#1f77b4", lw=2, label=r"moving  $\cos(\pi x/2)$")
        images.plot(x, solution.fixed, color="#c0392b", lw=2, label=r"fixed  $x + 0.07\,\sin 3\pi x$")
        images.set(title="The images", xlabel="$x$", ylabel="value")
        images.legend(loc="upper center", ncols=2, fontsize=10, handlelength=1.2, columnspacing=1.0)

        analytic = r"analytic  $\frac{2}{\pi}\,\arccos(x + 0.07\,\sin 3\pi x)$"
        maps.plot(x, solution.analytic, color="0.72", lw=9, solid_capstyle="round", label=analytic)
        maps.plot(x, solution.network, color="#d99a00", lw=2.2, label=r"network  $\Xi_{\mathcal{F}}$, not trained")
        maps.set(title="The maps from fixed to moving", xlabel="$x$ in the fixed image", ylabel="in the moving image")
        maps.legend(loc="upper right", fontsize=10, handlelength=1.4)
        for axes in (images, maps):
            axes.set(xlim=(0, 1), ylim=(0, 1.22), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])

        # The error oscillates from voxel to voxel, so draw its envelope.
        envelope = F.max_pool1d(F.pad(solution.error[None, None], (32, 32)), 65, stride=1)[0, 0]
        errors.semilogy(x, envelope, color="#d99a00", lw=2)
        errors.axhline(TOLERANCE, color="0.35", lw=1, ls="--")
        errors.text(0.02, 1.25 * TOLERANCE, f"{TOLERANCE:g}", color="0.35", va="bottom")
        errors.axhline(float(x[1]), color="0.35", lw=1, ls=":")
        errors.text(0.02, 1.25 * float(x[1]), "one voxel", color="0.35", va="bottom")
        errors.set(title="Their distance (largest of 65 voxels)", xlabel="$x$ in the fixed image")
        errors.set(xlim=(-0.02, 1.02), ylim=(1e-7, 3e-2))
        figure.savefig(path, dpi=100)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json and figure.png")
    out: Path = parser.parse_args().out
    record = provenance()

    start = time.perf_counter()
    solution = solve_1d()
    inner = slice(MARGIN_2D, -MARGIN_2D)
    error_2d, moved_2d = solve_2d()
    results = {
        "1d": {
            "voxels": VOXELS_1D,
            "bandwidth": BANDWIDTH_1D,
            "max_error": float(solution.error.max()),
            "mean_error": float(solution.error.mean()),
            "max_error_below_x_0.99": float(solution.error[solution.points < 0.99].max()),
            "tolerance": TOLERANCE,
        },
        "2d": {
            "voxels": [SIDE_2D, SIDE_2D],
            "bandwidth_voxels": BANDWIDTH_2D,
            "max_displacement_voxels": float(moved_2d.max()),
            "max_error_voxels": float(error_2d.max()),
            "mean_error_voxels": float(error_2d.mean()),
            "max_error_voxels_inside": float(error_2d[inner, inner].max()),
            "inside_margin_voxels": MARGIN_2D,
        },
        "seconds": round(time.perf_counter() - start, 2),
        **record,
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(solution, out / "figure.png")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
