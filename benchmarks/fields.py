"""Time the network and the optimisation of the fields at the scans' own resolution; measure memory, Dice and folds.

    PYTHONPATH=src python benchmarks/fields.py pairs.npz --out benchmarks/results/fields-gpu.json

`pack.py` prepares the pairs. Seconds are medians of `--runs` runs after one that compiles kernels, from images in the
device's memory to fields in it. `same_bits` tells whether all runs gave the same field.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from carlreg.fast.precision import mixed_precision
from carlreg.geometry.jacobian import folding
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Transform, warp
from carlreg.model.files import load
from carlreg.model.loaded import load_model
from carlreg.objective.fields import optimize_fields
from carlreg.objective.metrics import dice, mean_score

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sets", nargs="+", help="sets to use (default: all)")
    parser.add_argument("--model", type=Path, help="model file (default: the default model)")
    parser.add_argument("--settings", type=json.loads, default=[{}], help="a JSON list of keyword arguments")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load(arguments.model).to(device).eval() if arguments.model else load_model("default", device).network
    report: dict[str, Any] = {"commit": arguments.commit, "machine": machine_name(device), "seed": 0}
    report |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "runs": arguments.runs, "rows": []}
    with np.load(arguments.pairs) as arrays:
        for name in arguments.sets or sorted({key.split("/")[0] for key in arrays}):
            pair = Pair(arrays, name, network, device)
            for settings in arguments.settings:
                row = {"set": name, "settings": settings, **pair.measure(arguments.runs, settings)}
                report["rows"].append(row)
                print(json.dumps(row), flush=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"


class Pair:
    """Two images on their own voxels, with labels, and the network that registers them."""

    def __init__(self, arrays: Any, name: str, network: Any, device: torch.device) -> None:
        def tensor(key: str) -> Tensor:
            return torch.from_numpy(arrays[f"{name}/{key}"])[None, None].to(device).float()

        self.moving, self.fixed = (tensor(f"{role}/image") / 255 for role in ("moving", "fixed"))
        self.labels = tensor("moving/labels"), tensor("fixed/labels")
        self.spacings: dict[str, Any] = {
            f"{role}_spacing": tuple(float(mm) for mm in arrays[f"{name}/{role}/spacing"])
            for role in ("moving", "fixed")
        }
        self.network = network
        self.small = [resize(image, (96,) * 3) for image in (self.moving, self.fixed)]

    def answer(self) -> tuple[Transform, Transform]:
        with torch.no_grad(), mixed_precision(self.fixed.device):
            forward, backward = self.network.both(*self.small)
        return forward, backward

    def measure(self, runs: int, settings: dict[str, Any]) -> dict[str, Any]:
        cuda = self.fixed.is_cuda
        first, seconds = timed(self.answer, runs, cuda)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

        def optimized() -> Any:
            forward, backward = first[0]
            return optimize_fields(forward, backward, self.moving, self.fixed, **self.spacings, **settings)

        results, fields_seconds = timed(optimized, runs, cuda)
        row: dict[str, Any] = {"shape": list(self.fixed.shape[2:]), "network_s": seconds, "fields_s": fields_seconds}
        if cuda:
            row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
            row["before_gb"] = round(before / 1e9, 3)
        fields = [result.transform.displacement for result in results]
        row["same_bits"] = all(torch.equal(fields[0], field) for field in fields[1:])
        row["most_apart"] = max(float((fields[0] - field).abs().max()) for field in fields)
        row |= {"dice_network": self.dice(first[0][0]), "dice_fields": self.dice(results[0].transform)}
        row |= {"folds_percent": folding(results[0].transform, self.fixed), "losses": results[0].losses}
        return row

    def dice(self, phi: Transform) -> float:
        moving, fixed = self.labels
        return round(mean_score(dice(warp(moving, phi, like=fixed, mode="nearest"), fixed)), 4)


def timed(call: Callable[[], Result], runs: int, cuda: bool) -> tuple[list[Result], dict[str, float]]:
    """The results of all runs, and the seconds of the first and the median of the others."""
    results, seconds = [], []
    for _ in range(runs + 1):
        start = time.perf_counter()
        results.append(call())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return results, {"first": round(seconds[0], 4), "median": round(statistics.median(seconds[1:] or seconds), 4)}


if __name__ == "__main__":
    main()
