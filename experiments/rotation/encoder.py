"""Train the encoder of CARL{ROT} to match positions between two brains at any rotation.

    python experiments/rotation/encoder.py carry/turned.npz OUT --seconds 400      # repeat until all steps are done
    python experiments/rotation/brain.py carry/turned.npz OUT2 --model OUT/model.safetensors

Two training brains, aligned with each other about as well as by an affine registration, are each transformed by a
random affine map, M ∘ P and F ∘ S: a rotation drawn uniformly from SO(3) with a little shear, scaling and translation.
The point y of F ∘ S corresponds to P⁻¹(S(y)) in M ∘ P. The loss is the cross-entropy between the attention of a voxel y
and the weights of linear interpolation at that position, whose centre of mass is the position itself. This replaces the
paper's first stage, diffusion on Ξ alone, which in a new network maps all points to the same place.

The encoder is not averaged over half turns here: it is trained on all rotations anyway, and this is four times as fast.
Writes state.pt (to resume from), log.jsonl, encoder.json and model.safetensors, the whole CARL{ROT} with untrained
refinements.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from angles import MM  # type: ignore[import-not-found]
from torch import Tensor

from carlreg.fast.precision import mixed_precision
from carlreg.files.atomic import write_atomically
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.grids import interpolate, pool, voxel_points
from carlreg.geometry.transforms import Affine, Transform, compose, warp
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm
from carlreg.model.encoder import Symmetrized
from carlreg.model.files import save
from carlreg.model.zoo import carl_rot, first_step
from carlreg.preparation import FOREGROUND
from carlreg.training.stages import Stage

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from brain import HANDED, UNETS  # type: ignore[import-not-found]
from train import Data, add_arguments  # type: ignore[import-not-found]

PADDING = 4
"""Coarse voxels of padding around the images; less than in the network, for speed."""
QUERIES = 1024
"""Voxels of each image to match in the other."""
WIDE = 95 * MM
"""Millimetres between the first and the last voxel of an image, on any grid."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(steps=4000, rate=1e-3, final_rate=1e-5, pairs=8)
    parser.add_argument(
        "--handed", type=int, default=HANDED, help="determinants in the encoder that distinguish left from right"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    model = carl_rot(3, 2, width=arguments.width, handed=arguments.handed, **UNETS).to(device)
    xi = next(part for part in model.modules() if isinstance(part, CoordinateAttention))
    assert isinstance(xi.encoder, Symmetrized)
    alone = CoordinateAttention(xi.encoder.encoder, PADDING, xi.length)
    data = Data(arguments.data, arguments.side, device)
    scans = torch.cat([data.image(key) for key in data.names["brain", "train"]])
    kept_back = torch.cat([data.image(key) for key in data.names["brain", "dev"]])
    optimizer = torch.optim.Adam(alone.parameters(), lr=arguments.rate, fused=True)
    stage = Stage(arguments.steps, learning_rate=arguments.rate, final_learning_rate=arguments.final_rate, warm_up=50)
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept, begun, start = arguments.out / "state.pt", 0, time.monotonic()
    if kept.exists():
        state = torch.load(kept, map_location=device, weights_only=True)
        begun = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def keep(step: int) -> None:
        buffer = io.BytesIO()
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        write_atomically(kept, buffer.getvalue())

    step = begun
    for step in range(begun, arguments.steps):
        if arguments.seconds is not None and time.monotonic() - start > arguments.seconds:
            break
        generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = matching_loss(alone, *views(scans, arguments.pairs, generator), generator)
        loss.backward()
        optimizer.step()
        validates = (step + 1) % arguments.validate_every == 0
        if validates or (step + 1) % 50 == 0:
            passed = round(time.monotonic() - start, 1)
            entry: dict[str, Any] = {"step": step + 1, "loss": float(loss.detach()), "seconds": passed}
            if validates:
                entry |= {"dev_" + what: value for what, value in errors(first_step(model), kept_back).items()}
                keep(step + 1)
            print(entry, flush=True)
            with (arguments.out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
    else:
        step = max(begun, arguments.steps)
    keep(step)
    report = {"commit": arguments.commit, "seed": arguments.seed, "steps": step, "seconds": time.monotonic() - start}
    report |= {"dev_" + what: value for what, value in errors(first_step(model), kept_back).items()}
    print(report, flush=True)
    write_atomically(arguments.out / "encoder.json", (json.dumps(report, indent=2) + "\n").encode())
    about = {"name": "carl-rot", "grid": " ".join(3 * [str(arguments.side)]), "voxel": f"{MM:g}"}
    save(model, arguments.out / "model.safetensors", dtype=torch.float16, metadata=about)


def views(scans: Tensor, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Affine, Affine]:
    """Random pairs of brains M ∘ P and F ∘ S, (B, 1, *shape) each, some of them both mirrored; and P and S."""
    chosen = torch.stack([torch.randperm(len(scans), generator=generator)[:2] for _ in range(pairs)]).to(scans.device)
    first, second = (view(scans.shape[2:], pairs, scans, generator) for _ in range(2))
    mirrored = (torch.rand(pairs, 1, 1, 1, 1, generator=generator) < 0.5).to(scans.device)
    images = []
    for by, index in ((first, chosen[:, 0]), (second, chosen[:, 1])):
        gamma = torch.exp(0.25 * torch.randn(pairs, 1, 1, 1, 1, generator=generator)).to(scans.device)
        brain = torch.where(mirrored, scans[index].flip(2), scans[index])
        images.append(warp(brain, by, like=scans, outside="zeros").clamp(1e-4, 1) ** gamma)
    return images[0], images[1], first, second


def view(shape: torch.Size, count: int, like: Tensor, generator: torch.Generator) -> Affine:
    """A rotation about the centre, a small random linear map, and a translation."""
    linear = torch.eye(3) + 0.04 * torch.randn(count, 3, 3, generator=generator)
    shift = 0.04 * torch.randn(count, 3, generator=generator)
    linear = linear.to(like) @ random_rotation(shape, count, like=like, generator=generator).linear
    centre = torch.full((3,), 0.5).to(like)
    return Affine.from_parts(linear, centre - linear @ centre + shift.to(like))


def matching_loss(
    xi: CoordinateAttention, moving: Tensor, fixed: Tensor, p: Affine, s: Affine, generator: torch.Generator
) -> Tensor:
    """Mean cross-entropy of the attention between M ∘ P and F ∘ S, in both directions."""
    batch = len(moving)
    coarse = pool(pool(torch.cat([moving, fixed])))
    with mixed_precision(coarse.device):
        features = xi.features(coarse)
    features = xi.length * F.normalize(features.float(), dim=-1)
    of_moving, of_fixed = features[:batch], features[batch:]
    forward = cross_entropy(xi, of_moving, of_fixed, compose(p.inverse(), s), coarse, generator)
    backward = cross_entropy(xi, of_fixed, of_moving, compose(s.inverse(), p), coarse, generator)
    return (forward + backward) / 2


def cross_entropy(
    xi: CoordinateAttention,
    keys: Tensor,
    queries: Tensor,
    to_keys: Transform,
    image: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """−Σ w log(attention) with the weights w of linear interpolation. Features are (B, *padded shape, width)."""
    batch = len(keys)
    points = voxel_points(image).flatten(1, -2)  # (1, N, D)
    chosen = torch.randint(points.shape[1], (QUERIES,), generator=generator).to(points.device)
    asked = xi.crop(queries).flatten(1, -2)[:, chosen]
    # Coarse voxels are means of 4³ fine ones, so the outermost coarse centres lie inside the image.
    share = 1 - 3 / (4 * image.shape[-1] - 1)
    whole = 0.5 + share * (points[:, chosen] - 0.5)
    target = 0.5 + (to_keys(whole.expand(batch, -1, -1)) - 0.5) / share
    padded = keys.shape[1] - 1
    right = interpolate(keys.movedim(-1, 1), (target * (padded - 2 * xi.padding) + xi.padding) / padded).mT
    with mixed_precision(keys.device):
        logits = asked @ keys.flatten(1, -2).mT
    return (logits.float().logsumexp(dim=-1) - (asked * right).sum(dim=-1)).mean()


@torch.no_grad()
def errors(xi: RegistrationAlgorithm, scans: Tensor) -> dict[str, float]:
    """Errors of the whole Ξθ, with its encoder averaged over half turns, on pairs of kept-back brains: the distance
    from an affine registration over the brain, in millimetres, and the share of voxels with more than 30 mm."""
    was = xi.training
    xi.eval()
    generator = torch.Generator().manual_seed(0)
    apart = []
    for _ in range(6):
        moving, fixed, p, s = views(scans, 1, generator)
        with mixed_precision(scans.device):
            phi = xi(moving, fixed)
        points = voxel_points(fixed)[:, ::4, ::4, ::4]
        inside = fixed[:, 0, ::4, ::4, ::4] > FOREGROUND
        off = (phi(points) - p.inverse()(s(points)))[inside] * WIDE
        apart.append(off.square().sum(dim=-1).sqrt())
    xi.train(was)
    every = torch.cat(apart)
    return {"median": float(every.median()), "mean": float(every.mean()), "lost": float((every > 30).float().mean())}


if __name__ == "__main__":
    main()
