"""Measure whether the result follows when one image is shifted, for untrained networks with random weights.

    python experiments/shift/run.py

The moving image is a smooth texture on a blank canvas; the fixed image is the same texture. The texture is shifted in
the moving image by 1, 2, 3 … voxels; the result should change by exactly that shift. Writes results.json and shift.png
beside this file, in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carlreg import CoordinateAttention, Downsample, PredictDisplacement, RegistrationAlgorithm, TwoStep
from carlreg.model.encoder import Encoder
from carlreg.model.unet import UNet
from carlreg.objective.losses import gaussian_blur

HERE = Path(__file__).parent
SIDE, MARGIN, LARGEST = 96, 52, 24
"""Voxels: the side of the texture, the blank margin at both ends (the encoder needs it), and the largest shift."""
DOWN, UP = (4, 8, 8, 8, 8), (8, 8, 8, 8, 8)
"""Narrow U-Nets, as deep as the paper's."""
LENGTH = 80.0
"""Length of the feature vectors. Random features are similar, and only long ones make attention compact."""
MOVE = 3.0
"""Mean displacement of each refinement in voxels, so that refinements have an effect."""


def texture() -> Tensor:
    """The texture; also the fixed image of networks that accept images of different shapes."""
    noise = torch.randn(1, 1, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    blurred = gaussian_blur(noise, 8.0)
    return blurred / blurred.std()


def shifted(voxels: int) -> Tensor:
    """The moving image: the texture, shifted by this many voxels along the first axis."""
    canvas = torch.zeros(1, 1, SIDE + 2 * MARGIN + LARGEST, SIDE, dtype=torch.float64)
    canvas[:, :, MARGIN + voxels :][:, :, :SIDE] = texture()
    return canvas


def psi() -> PredictDisplacement:
    """A refinement whose last convolution is random instead of zero; `calibrate` scales it."""
    unet = UNet(2, down=DOWN, up=UP)
    nn.init.normal_(unet.last.weight)
    return PredictDisplacement(unet)


def tree(first: RegistrationAlgorithm, aligned: bool = True) -> RegistrationAlgorithm:
    return TwoStep(Downsample(TwoStep(Downsample(first, aligned), psi()), aligned), psi())


def calibrate(model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> RegistrationAlgorithm:
    """Set evaluation mode and scale every U-Net so that it moves points by MOVE voxels (RMS) on this pair."""

    def scale(unet: UNet, _: object, output: Tensor) -> Tensor:
        sides = torch.tensor(output.shape[2:])[None, :, None, None] - 1
        factor = MOVE / (output * sides).square().sum(1).mean().sqrt()
        for values in unet.last.parameters():
            values.data *= factor
        return output * factor

    model = model.double().eval().requires_grad_(False)
    hooks = [unet.register_forward_hook(scale) for unet in model.modules() if isinstance(unet, UNet)]
    model(moving, fixed)
    for hook in hooks:
        hook.remove()
    return model


def errors(model: RegistrationAlgorithm, fixed: Tensor) -> list[float]:
    """For every shift, the mean distance in voxels between it and the change of the result, over the fixed texture."""
    sides = torch.tensor(shifted(0).shape[2:]) - 1
    answers = [sides * model(shifted(voxels), fixed).on_grid_of(fixed) for voxels in range(LARGEST + 1)]
    start = MARGIN if fixed.shape[2] > SIDE else 0
    changes = [(answer - answers[0])[:, start:][:, :SIDE] for answer in answers]
    return [float((change - torch.tensor([n, 0])).norm(dim=-1).mean()) for n, change in enumerate(changes)]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (plain, log) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("tab:blue", "tab:red", "#d99a00"), strict=True):
        plain.plot(range(0, LARGEST + 1, 4), curve[::4], "o-", ms=5, color=colour, label=name)
        log.semilogy(range(1, LARGEST + 1), curve[1:], "o-", ms=4, color=colour)
    plain.set(title="Shifts by whole blocks", ylabel="mean error of the result, voxels")
    log.set(title="All shifts, on a logarithmic scale", ylim=(1e-16, 1e3))
    for axes in (plain, log):
        axes.set(xlabel="shift of the moving image, voxels", xticks=range(0, LARGEST + 1, 4))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*plain.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json and shift.png")
    out: Path = parser.parse_args().out
    curves: dict[str, Any] = {}
    for name, aligned, attends in (
        ("displacements only (GradICON's tree)", True, False),
        ("CARL's tree, pooling as published", False, True),
        ("CARL's tree, exact pooling", True, True),
    ):
        torch.manual_seed(0)
        first = CoordinateAttention(Encoder(2, width=16), length=LENGTH) if attends else psi()
        fixed = texture() if attends else shifted(0)  # U-Nets alone need images of the same shape
        curves[name] = errors(calibrate(tree(first, aligned), shifted(0), fixed), fixed)
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=HERE, capture_output=True, text=True, check=True
    ).stdout.strip()
    result = {"commit": commit, "torch": torch.__version__, "shifts": list(range(LARGEST + 1)), "errors": curves}
    (out / "results.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(curves, out / "shift.png")


if __name__ == "__main__":
    main()
