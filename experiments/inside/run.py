"""Attention masks and linear probes of a trained network on abdominal CT, as in the paper's appendix.

    python experiments/inside/run.py ../shared/data/abdomen/val experiments/inside --pairs 12

Writes results.json with all pairs and, for the first pair, masks.png (25 random voxels), point.png, certainty.png and
probe.png. Images and labels are NAME.nii.gz and NAME_labels.nii.gz; pairs are all ordered pairs of different subjects.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.explain import draw_certainty, draw_masks, draw_point, draw_probe, explain, probe
from carlreg.files.images import read_labels
from carlreg.model.shipped import DEFAULT
from carlreg.paper_data import learn2reg, oasis

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

ORGANS = [6, 2, 3, 1, 11]
"""Liver, kidneys, spleen, pancreas: the structures of the paper's probe."""
NEAR_MM = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(oasis.pairs(arguments.data)[: arguments.pairs]):
        assert pair.fixed_seg is not None
        assert pair.moving_seg is not None
        explained = explain(fixed=pair.fixed, moving=pair.moving, model=arguments.model, device=arguments.device)
        voxels = explained.random_voxels(25)
        spreads, near, border = [], [], []
        for voxel in voxels:
            mask = explained.mask(voxel)
            _, spread = explained.match(mask)
            index = np.stack(np.meshgrid(*(np.arange(n) for n in mask.shape), indexing="ij"), axis=-1)
            world = index @ mask.affine[:-1, :-1].T + mask.affine[:-1, -1]
            peak = world.reshape(-1, mask.dim)[mask.data.argmax()]
            near.append(float(mask.data[np.linalg.norm(world - peak, axis=-1) < NEAR_MM].sum()))
            spreads.append(spread)
            border.append(1 - float(mask.data[(slice(2, -2),) * mask.dim].sum()))
        certainty = explained.certainty()
        trained, heat, scores = probe(explained, read_labels(pair.moving_seg), read_labels(pair.fixed_seg), ORGANS)
        rows.append(
            {
                "pair": pair.name,
                "spread_mm_of_25_voxels": {"median": float(np.median(spreads)), "largest": max(spreads)},
                f"share_within_{NEAR_MM:.0f}_mm_of_the_peak": {"median": float(np.median(near)), "least": min(near)},
                "share_in_the_two_outermost_layers_of_the_padding": {"largest": max(border)},
                "spread_mm_of_all_voxels": {"median": float(np.median(certainty.data))},
                "probe_dice": {learn2reg.LABELS[label]: score for label, score in scores.items()},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if number == 0:
            point = max(voxels, key=lambda voxel: float(explained.inside.fixed[0, 0][voxel]))
            pictures = {
                "masks.png": draw_masks(explained, voxels),
                "point.png": draw_point(explained, point),
                "certainty.png": draw_certainty(explained, certainty),
                "probe.png": draw_probe(explained, trained, heat, scores, learn2reg.LABELS),
            }
            for name, picture in pictures.items():
                (arguments.out / name).write_bytes(picture)
    probes = {name: float(np.mean([row["probe_dice"][name] for row in rows])) for name in rows[0]["probe_dice"]}
    report = {
        "commit": commit(),
        "machine": machine(),
        "model": DEFAULT if arguments.model == "default" else arguments.model,
        "pairs": len(rows),
        "mean_probe_dice": probes,
        "rows": rows,
    }
    (arguments.out / "results.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
