"""Teach the encoder of CARL{ROT} to find each place of one brain again in another, however the two are turned.

    python experiments/rotation/encoder.py carry/turned.npz OUT --seconds 400      # again, until all steps are done
    python experiments/rotation/brain.py carry/turned.npz OUT2 --model OUT/model.safetensors

Two training brains, which lie in one frame about as well as an affine registration lays them, are seen through affine
maps of their own: M ∘ P and F ∘ S, each a rotation drawn uniformly from SO(3), a little sheared, scaled and shifted.
What F ∘ S shows at y, M ∘ P shows at P⁻¹(S(y)). The loss is the cross-entropy between the attention of a voxel y and
the weights that interpolate linearly at that place, whose centre of mass is the place itself. It stands in for the
paper's first stage, diffusion on Ξ alone, which from a fresh start sends all points to one.

The encoder is not averaged over half turns here: it meets all rotations anyway, and this is four times as fast. Writes
state.pt (to go on from), log.jsonl, encoder.json and model.safetensors: the whole CARL{ROT}, its refinements untrained.
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
"""Coarse voxels of empty space around the images: less than the network has, for speed."""
QUERIES = 1024
"""Voxels of each image that look for their place in the other."""
WIDE = 95 * MM
"""Millimetres from the first voxel of an image to its last, whatever grid it is seen at."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(steps=4000, rate=1e-3, final_rate=1e-5, pairs=8)
    parser.add_argument("--handed", type=int, default=HANDED, help="determinants in the encoder that tell the sides")
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
        if (step + 1) % 50 == 0:
            passed = round(time.monotonic() - start, 1)
            entry: dict[str, Any] = {"step": step + 1, "loss": float(loss.detach()), "seconds": passed}
            if (step + 1) % arguments.validate_every == 0:
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
    """Two brains of each pair, M ∘ P and F ∘ S, (B, 1, *shape) each, perhaps both mirrored; and P and S."""
    chosen = torch.stack([torch.randperm(len(scans), generator=generator)[:2] for _ in range(pairs)]).to(scans.device)
    first, second = (view(scans.shape[2:], pairs, scans, generator) for _ in range(2))
    mirrored = (torch.rand(pairs, 1, 1, 1, 1, generator=generator) < 0.5).to(scans.device)
    seen = []
    for by, index in ((first, chosen[:, 0]), (second, chosen[:, 1])):
        gamma = torch.exp(0.25 * torch.randn(pairs, 1, 1, 1, 1, generator=generator)).to(scans.device)
        brain = torch.where(mirrored, scans[index].flip(2), scans[index])
        seen.append(warp(brain, by, like=scans, outside="zeros").clamp(1e-4, 1) ** gamma)
    return seen[0], seen[1], first, second


def view(shape: torch.Size, count: int, like: Tensor, generator: torch.Generator) -> Affine:
    """A rotation about the middle, then a little of any linear map, and a shift."""
    linear = torch.eye(3) + 0.04 * torch.randn(count, 3, 3, generator=generator)
    shift = 0.04 * torch.randn(count, 3, generator=generator)
    linear = linear.to(like) @ random_rotation(shape, count, like=like, generator=generator).linear
    centre = torch.full((3,), 0.5).to(like)
    return Affine.from_parts(linear, centre - linear @ centre + shift.to(like))


def matching_loss(
    xi: CoordinateAttention, moving: Tensor, fixed: Tensor, p: Affine, s: Affine, generator: torch.Generator
) -> Tensor:
    """Of the attention of M ∘ P and F ∘ S to each other, both ways, averaged."""
    batch = len(moving)
    coarse = pool(pool(torch.cat([moving, fixed])))
    with mixed_precision(coarse.device):
        features = xi.features(coarse)
    features = xi.length * F.normalize(features.float(), dim=-1)
    here, there = features[:batch], features[batch:]
    one_way = cross_entropy(xi, here, there, compose(p.inverse(), s), coarse, generator)
    return (one_way + cross_entropy(xi, there, here, compose(s.inverse(), p), coarse, generator)) / 2


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
    # A coarse voxel is the mean of 4³ fine ones: its grid ends that much before the image does.
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
    """Of whole Ξθ, encoder averaged over half turns, on pairs of brains kept back: how far it is from where an affine
    registration would be, in millimetres over the brain, and which share of the voxels is off by more than 30."""
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
