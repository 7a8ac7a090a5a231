"""Train a network that recognises structures, `structure_net.py`, on all labelled sets, in any contrast.

    python experiments/base/prepare.py DATA carry/heart.npz --sets cardiac --side 160 --structures --most-mib 18
    python experiments/base/prepare.py DATA carry/brain.npz --sets brain brain_maps --side 128 --structures \
        --most-mib 18
    python experiments/base/prepare.py DATA carry/rest.npz --sets abdomen abdomen_mr hippocampus --structures \
        --most-mib 18
    python experiments/base/structures.py carry/*.npz --out OUT --seconds 560

Images are drawn, deformed and changed in contrast as in `universal.py`, on its three grids. Label maps of heads are
rendered in random contrasts. The loss is the cross-entropy plus the overlap of each structure. Where the labels of a
set do not name a structure that its scans may show, as those of hearts do not name the liver, its probability counts as
that of the background.

The learning rate follows the time, so that a run ends within `--seconds`; a run that was cut off resumes from its
checkpoint with the same command. Weights are averaged over the last steps. Writes the network in half precision, and
the Dice of every set on `dev` (training subjects kept back) and `val` to scores.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import threading
import time
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from carlreg.fast.precision import mixed_precision

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.base.structure_net import SIDED, STRUCTURES, StructureNet, mirrored
from experiments.base.universal import VALUES, Mixture, Pair, View, other_contrast

MIX = {
    "cube": {
        "brain": 0.05,
        "brain_maps": 0.05,
        "abdomen": 0.5,
        "abdomen_mr": 0.1,
        "ct_mr": 0.15,
        "hippocampus": 0.1,
        "cardiac": 0.02,
    },
    "thin": {"cardiac": 0.85, "abdomen_mr": 0.1, "brain": 0.05},
    "fine": {"brain": 0.55, "brain_maps": 0.3, "map_with_brain": 0.15},
}
"""Relative frequency of each kind of pair on each grid."""
ABDOMEN = range(STRUCTURES.index("spleen") + 1, STRUCTURES.index("left adrenal") + 2)
NAMED: dict[str, list[int]] = {
    "brain": list(range(1, 2 * len(SIDED) + 4)),
    "brain_maps": list(range(1, 2 * len(SIDED) + 4)),
    "abdomen": list(ABDOMEN),
    "abdomen_mr": [1 + STRUCTURES.index(name) for name in ("spleen", "right kidney", "left kidney", "liver")],
    "cardiac": [1 + STRUCTURES.index(n) for n in STRUCTURES if "heart" in n or n == "myocardium"],
    "hippocampus": [1 + STRUCTURES.index(name) for name in ("anterior hippocampus", "posterior hippocampus")],
}
"""The structures that the labels of each set name."""
HEART = NAMED["cardiac"]
UNNAMED: dict[str, list[int]] = {
    "abdomen": HEART,
    "abdomen_mr": [*HEART, *(structure for structure in ABDOMEN if structure not in NAMED["abdomen_mr"])],
    "cardiac": list(ABDOMEN),
}
"""The structures that its scans may show as well."""
SUBCORTICAL = [
    1 + STRUCTURES.index(f"{side} {name}")
    for side in ("left", "right")
    for name in ("thalamus", "caudate", "putamen", "pallidum", "hippocampus", "amygdala", "accumbens")
]
FREESURFER = {
    **dict(zip((2, 3, 4, 7, 8, 10, 11, 12, 13, 17, 18, 26, 28), SIDED, strict=True)),
    **dict(zip((41, 42, 43, 46, 47, 49, 50, 51, 52, 53, 54, 58, 60), SIDED, strict=True)),
}
"""FreeSurfer's numbers of the structures with two sides; from 41 on, they are on the right."""
UNSURE = 255
AVERAGED = 0.15
"""The weights of this last share of the time are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="network to continue from")
    parser.add_argument("--seconds", type=float, default=560, help="time of the whole training")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of images in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--thin", type=float, default=0.2, help="share of batches on the grid for few slices")
    parser.add_argument("--fine", type=float, default=0.35, help="share of batches of half the pairs on the finer grid")
    parser.add_argument("--changed", type=float, default=0.5, help="share of images in a random contrast")
    parser.add_argument("--validate-every", type=float, default=140, help="seconds between scores on dev")
    parser.add_argument("--compile", action="store_true", help="compile the network")
    parser.add_argument("--score", action="store_true", help="score --model; do not train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = Scans(arguments.packs, device, {"thin": arguments.thin, "fine": arguments.fine})
    data.changed, data.room, data.bent, data.across = arguments.changed, 0.3, 0.6, 0.3
    data.mixes = {grid: {k: v for k, v in mix.items() if data.has(k)} for grid, mix in MIX.items()}
    network = StructureNet(3, len(STRUCTURES)).to(device)
    if arguments.model is not None:
        network.load_state_dict({k: v.float() for k, v in load_file(arguments.model).items()})
    if not arguments.score:
        network = fit(network, data, arguments)
        tensors = {name: value.half().contiguous().cpu() for name, value in network.state_dict().items()}
        save_file(tensors, arguments.out / "structures.safetensors")
        network.load_state_dict({name: value.float() for name, value in tensors.items()})
    report = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seed": arguments.seed,
        "settings": {k: v for k, v in vars(arguments).items() if k in ("seconds", "pairs", "rate", "thin", "fine")},
        **{split: data.recognised(network, split) for split in ("dev", "val")},
    }
    (arguments.out / "scores.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({split: brief(report[split]) for split in ("dev", "val")}), flush=True)


class Scans(Mixture):
    """Packed scans, drawn one by one with maps of their structures."""

    def __init__(self, paths: list[Path], device: torch.device, shares: dict[str, float]) -> None:
        super().__init__(paths, device, shares)
        self.names.pop(("brain_ibsr", "train"), None)  # without names of structures
        table = torch.zeros(256, dtype=torch.uint8, device=device)
        for number, value in enumerate(VALUES):
            if (name := FREESURFER.get(value)) is not None:
                table[number] = 1 + STRUCTURES.index(f"{'right' if value > 40 else 'left'} {name}")
        for value, sides in ((5, "left lateral ventricle"), (44, "right lateral ventricle"), (14, "third ventricle")):
            table[VALUES.index(value)] = 1 + STRUCTURES.index(sides)
        for value, name in ((15, "fourth ventricle"), (16, "brain stem")):
            table[VALUES.index(value)] = 1 + STRUCTURES.index(name)
        self.structure = table
        self.named, self.rest = (
            {name: torch.zeros(1 + len(STRUCTURES), device=device) for name in NAMED} for _ in range(2)
        )
        for name, numbers in NAMED.items():
            self.named[name][numbers] = 1.0
            self.rest[name][[0, *UNNAMED.get(name, [])]] = 1.0

    def has(self, kind: str) -> bool:
        needs = {"map_with_brain": ("brain_maps", "brain"), "ct_mr": ("abdomen", "abdomen_mr")}
        return all((name, "train") in self.names for name in needs.get(kind, (kind,)))

    def _known(self, grid: str, view: View, pair: Pair) -> Tensor:
        return self.structures_of(view.key, grid)

    def structures_of(self, key: str, grid: str) -> Tensor:
        if key.startswith("brain_maps/"):
            return self.structure[self.on_grid(key, grid).long()]
        return self.on_grid(f"{key}/structures", grid)

    def images(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Images and maps of their structures, (B, 1, *shape) each, and which structures the maps name and which they
        call background, (B, 2, 1 + K)."""
        own = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        grid, left = "cube", float(torch.rand((), generator=generator))
        for name, share in self.shares.items():
            grid = name if 0 <= left < share else grid
            left -= share
        pairs = [self._choose(grid, generator) for _ in range(max(1, count // 2) if grid == "fine" else count)]
        for pair in pairs:
            pair.compare = "images"
        views = [pair.moving for pair in pairs] + [pair.fixed for pair in pairs]
        inputs, _, labels = self._views(grid, views, pairs, own)
        labels = labels.round().byte()
        for number, view in enumerate(views):
            if view.key.startswith("brain") and float(torch.linalg.det(view.matrix[:, :3])) < 0:
                labels[number] = mirrored(labels[number])
        sets = [view.key.split("/")[0] for view in views]
        return inputs, labels, torch.stack([torch.stack([self.named[one], self.rest[one]]) for one in sets])

    @torch.no_grad()
    def recognised(self, network: StructureNet, split: str) -> dict[str, dict[str, float]]:
        """Dice of every structure, mean over the scans of each set."""
        network.eval()
        scores: dict[str, dict[str, float]] = {}
        for name in (*NAMED, "brain_other_contrast"):
            of = name.removesuffix("_other_contrast")
            rows: dict[str, list[float]] = {}
            grid = self.scored_grid(name)
            keys = [
                k for k in self.names.get((of, split), []) if of == "brain_maps" or f"{k}/structures" in self.packed
            ]
            for number, key in enumerate(keys[:20]):
                image = self.scored_image(key, grid, number % 10)
                image = other_contrast(image, number % 10) if name != of else image
                with mixed_precision(self.device):
                    likely = network(image).float().softmax(1)
                likely[:, 0] = (likely * self.rest[of].reshape(1, -1, 1, 1, 1)).sum(1)
                likely[:, 1:] *= self.named[of][1:].reshape(1, -1, 1, 1, 1)
                found, true = likely.argmax(1)[0], self.structures_of(key, grid)
                for structure in NAMED[of]:
                    a, b = (found == structure) & (true != UNSURE), true == structure
                    if bool(b.any()):
                        overlap = float(2 * (a & b).sum() / (a.sum() + b.sum()))
                        rows.setdefault(STRUCTURES[structure - 1], []).append(overlap)
            if rows:
                scores[name] = {structure: float(np.mean(values)) for structure, values in rows.items()}
                deep = [scores[name][STRUCTURES[s - 1]] for s in SUBCORTICAL if STRUCTURES[s - 1] in scores[name]]
                scores[name] |= {"mean": float(np.mean([*scores[name].values()]))}
                scores[name] |= {"subcortical": float(np.mean(deep))} if deep else {}
        network.train()
        return scores


def brief(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: round(row.get("subcortical", row["mean"]), 4) for name, row in scores.items()}


def loss_of(logits: Tensor, labels: Tensor, named: Tensor) -> Tensor:
    """Cross-entropy plus 1 − Dice: (B, 1 + K, *shape), (B, 1, *shape), (B, 2, 1 + K)."""
    named, others = named.unbind(1)
    probability = logits.float().flatten(2).softmax(1)
    index = labels.flatten(1).long()
    sure = (index != UNSURE).float()
    index = torch.where(index == UNSURE, 0, index)
    rest = (probability * others[:, :, None]).sum(1)  # of the background and of what the labels call so
    own = probability.gather(1, index[:, None])[:, 0]
    own = torch.where(index == 0, rest, own)
    crossed = -(own.clamp(min=1e-6).log() * sure).sum() / sure.sum()
    structures = named.shape[1]
    here = own * sure
    both = here.new_zeros(len(here), structures).scatter_add(1, index, here)
    true = here.new_zeros(len(here), structures).scatter_add(1, index, sure)
    found = (probability * sure[:, None]).sum(2)
    counted = named * (true > 0)
    dice = 2 * both / (true + found).clamp(min=1.0)
    return crossed + 1 - (dice * counted).sum() / counted.sum().clamp(min=1.0)


def fit(network: StructureNet, data: Scans, arguments: argparse.Namespace) -> StructureNet:
    """Train until the time is over; the average of the last weights."""
    checkpoint, began, spent, step = arguments.out / "checkpoint.pt", time.monotonic(), 0.0, 0
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=arguments.rate, weight_decay=1e-4, fused=data.device.type == "cuda"
    )
    averaged: dict[str, Tensor] | None = None
    count = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=data.device, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        spent, step, averaged, count = state["seconds"], state["step"], state["averaged"], state["count"]
        print(f"resuming at step {step}, {spent:.0f} s", flush=True)
    run = torch.compile(network, dynamic=False) if arguments.compile else network
    queue: Queue[tuple[Tensor, Tensor, Tensor]] = Queue(2)
    over = threading.Event()

    def draw() -> None:
        stream = torch.cuda.Stream() if data.device.type == "cuda" else None
        for number in itertools.count(step):
            generator = torch.Generator().manual_seed(arguments.seed * 10**9 + number)
            if stream is None:
                batch = data.images(generator, arguments.pairs)
            else:
                with torch.cuda.stream(stream):
                    batch = data.images(generator, arguments.pairs)
                stream.synchronize()
            if over.is_set():
                return
            queue.put(batch)

    threading.Thread(target=draw, daemon=True).start()
    losses, validated = [], spent
    while (seconds := spent + time.monotonic() - began) < arguments.seconds:
        part = seconds / arguments.seconds
        rate = arguments.rate * min(1, (step + 1) / 200) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = queue.get()
        if data.device.type == "cuda":  # the memory is of the other stream
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
        images, labels, named = batch
        with mixed_precision(data.device):
            logits = run(images)
        loss = loss_of(logits, labels, named)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        if part > 1 - AVERAGED and step % 10 == 0:
            weights = {name: value.detach().float() for name, value in network.state_dict().items()}
            if averaged is None:
                averaged = {name: value.clone() for name, value in weights.items()}
            count += 1
            for name, value in weights.items():
                averaged[name].lerp_(value, 1 / count)
        if step % 200 == 0:
            print(f"step {step} ({seconds:.0f} s): loss {float(torch.stack(losses).mean()):.4f}", flush=True)
            losses = []
        if seconds - validated > arguments.validate_every:
            validated = seconds
            print(f"dev at {seconds:.0f} s", brief(data.recognised(network, "dev")), flush=True)
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "seconds": seconds, "averaged": averaged, "count": count}, checkpoint)
    over.set()
    print(f"{step} steps; dev, last step", brief(data.recognised(network, "dev")), flush=True)
    if averaged is not None:
        network.load_state_dict(averaged)
    return network


if __name__ == "__main__":
    main()
