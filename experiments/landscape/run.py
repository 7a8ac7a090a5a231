"""Loss landscapes of a first step, alone and followed by a second, as in the paper's appendix.

    python experiments/landscape/run.py ../shared/data/retina experiments/landscape

A single-step network Φ is trained briefly on warped retina drawings. τ shifts every image by t along one axis; the
optimum is t = 0. LNCC of τ alone and of TwoStep{τ, Φ} is plotted against t, with its derivative, on warped test
drawings. Writes results.json and landscape.png, in a few minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.geometry.transforms import Affine, DisplacementField, Transform, warp
from carlreg.model.algorithms import PredictDisplacement, RegistrationAlgorithm, TwoStep
from carlreg.model.unet import UNet
from carlreg.objective.losses import diffusion, lncc
from carlreg.paper_data import retina

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit

SIDES = (565, 584)
ELASTIC = ((25.0, 3), (12.0, 6))
"""The two warps: standard deviation in pixels of the drawings, and control points per side."""


class FixedTranslation(RegistrationAlgorithm):
    """τ[M, F](r) = r + (t, 0), independent of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros(()))

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return Affine.translation(torch.stack([self.t, torch.zeros_like(self.t)])[None].expand(len(fixed), -1))


def elastic(image: Tensor, generator: torch.Generator) -> Tensor:
    """Warp by two random grids, one after the other."""
    for deviation, points in ELASTIC:
        scale = deviation / torch.tensor(SIDES)[None, :, None, None]
        control = scale * torch.randn(len(image), 2, points, points, generator=generator)
        field = F.interpolate(control, image.shape[2:], mode="bicubic", align_corners=True)
        image = warp(image, DisplacementField(field), like=image, outside="zeros")
    return image


def train(images: Tensor, steps: int, generator: torch.Generator) -> RegistrationAlgorithm:
    """Train Φ, a single displacement-predicting step, with LNCC and diffusion."""
    phi = PredictDisplacement(UNet(2))
    optimizer = torch.optim.Adam(phi.parameters(), lr=3e-4)
    for step in range(steps):
        moving = images[torch.randint(0, len(images), (4,), generator=generator)]
        fixed = elastic(moving, generator)
        transform = phi(moving, fixed)
        assert isinstance(transform, DisplacementField)
        loss = lncc(warp(moving, transform, like=fixed), fixed) + 1.5 * diffusion(transform.displacement)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, float(loss.detach()), flush=True)
    return phi.eval().requires_grad_(False)


def landscape(
    algorithm: RegistrationAlgorithm, tau: FixedTranslation, pair: tuple[Tensor, Tensor], shifts: Tensor
) -> Any:
    """LNCC and its derivative with respect to t, at every shift."""
    moving, fixed = pair
    losses, slopes = [], []
    for shift in shifts:
        tau.t.data = shift.clone()
        loss = lncc(warp(moving, algorithm(moving, fixed), like=fixed), fixed)
        (slope,) = torch.autograd.grad(loss, tau.t)
        losses.append(float(loss.detach()))
        slopes.append(float(slope))
    return {"loss": losses, "slope": slopes}


def towards_zero(shifts: Tensor, slopes: list[float], far: float) -> float:
    """The share of shifts up to `far` at which gradient descent moves towards 0; shifts below 0.01 do not count."""
    ways = [float(t) * s > 0 for t, s in zip(shifts, slopes, strict=True) if 0.01 < abs(float(t)) <= far + 1e-6]
    return sum(ways) / len(ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--points", type=int, default=31)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    sets = {
        split: torch.cat([retina.preprocess(retina.read(file)) for file in retina.files(arguments.data, split)])
        for split in ("train", "test")
    }
    phi, tau = train(sets["train"], arguments.steps, generator), FixedTranslation()
    moving = sets["test"].repeat(2, 1, 1, 1)
    pair = moving, elastic(moving, generator)
    shifts = torch.linspace(-0.3, 0.3, arguments.points)
    curves = {
        "τ": landscape(tau, tau, pair, shifts),
        "TwoStep{τ, Φ}": landscape(TwoStep(tau, phi), tau, pair, shifts),
    }
    for values in curves.values():
        values["share_towards_0"] = {str(far): towards_zero(shifts, values["slope"], far) for far in (0.1, 0.2, 0.3)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"commit": commit(), "steps": arguments.steps, "t": shifts.tolist(), "curves": curves}
    (arguments.out / "results.json").write_text(
        json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print({name: values["share_towards_0"] for name, values in curves.items()})
    draw(report, arguments.out / "landscape.png")


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, key, label in zip(figure.subplots(1, 2), ("loss", "slope"), ("LNCC", "d LNCC / dt"), strict=True):
        for name, values in report["curves"].items():
            axes.plot(report["t"], values[key], label=name)
        axes.axvline(0, color="grey", linewidth=0.5)
        axes.set(xlabel="t, in widths of the image", ylabel=label)
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
