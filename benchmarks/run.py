"""Measure the speed and memory of the fast path and of a plain implementation in the same run.

    python benchmarks/run.py            # measure on the GPU if there is one, else on the CPU; write results/*.json
    python benchmarks/run.py --plot     # draw results/*.png from earlier measurements

The plain implementation follows the paper, in our own code: float32 throughout, PyTorch's fused attention, one
direction after the other, the regulariser on the exact maps at every voxel. Times are medians after a warm-up.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.grids import Grid
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.attention import coordinate_attention, reference_attention
from carlreg.model.unet import UNet
from carlreg.model.zoo import carl
from carlreg.objective.losses import registration_loss
from carlreg.training.batches import Batch
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

RESULTS = Path(__file__).parent / "results"
FULL, TRAINING = 175, 96
"""Side of the paper's images, and of the images in the training step."""
SWEEP = (96, 128, 160, 175, 192, 224, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="only draw the plots of earlier measurements")
    parser.add_argument("--commit", default=_commit(), help="commit to record in the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the script")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.out)
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    result = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "seed": 0,
        **(measure_gpu(arguments.quick) if gpu else measure_cpu(arguments.quick)),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / ("gpu.json" if gpu else "cpu.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path.name}")


# ---- what is measured -----------------------------------------------------------------------------------------------


def measure_gpu(quick: bool) -> dict[str, Any]:
    full, training = (64, 32) if quick else (FULL, TRAINING)
    return {
        "attention": [printed(measure_attention(kind, full)) for kind in ("sharp", "flat", "trained")],
        "forward": printed(measure_forward(full)),
        "instance_optimisation_step": {
            "ours": printed(measure_step(carl(), full, pairs=1, learning_rate=2e-5)),
            "plain": printed(measure_step(carl(), full, pairs=1, learning_rate=2e-5, plain=True)),
        },
        "training_step": {
            "ours": printed(measure_training_step(training, pairs=4)),
            "without_graph": printed(measure_step(carl(refinements=2), training, pairs=4, train=True)),
            "plain": printed(measure_step(carl(refinements=2), training, pairs=4, train=True, plain=True)),
        },
        "sweep": [printed(measure_side(side)) for side in ((48, 64) if quick else SWEEP)],
    }


def printed(result: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(result), flush=True)
    return result


def features(kind: str, side: int) -> tuple[Tensor, Tensor, Grid]:
    """Queries and keys of length 4, as in Ξθ at this image side: sharp, flat, or like a trained encoder's.

    "flat" features deviate from their mean by a fifth of it; those of a new encoder by a third, as measured. "trained"
    features resemble trained ones: neighbours are similar (noise smoothed over 3 voxels), and the images differ by
    noise.
    """
    coarse = -(-side // 4)
    grid = Grid.of((coarse,) * 3).pad(9)
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    if kind == "trained":
        volume = torch.nn.functional.avg_pool3d(noise(1, 128, *grid.shape), 3, stride=1, padding=1)
        keys = volume.flatten(2).mT / volume.std()
    else:
        keys = noise(1, grid.count, 128)
    inside = keys.reshape(1, *grid.shape, 128)[:, 9:-9, 9:-9, 9:-9].reshape(1, -1, 128)
    if kind == "flat":
        common = noise(128)
        queries, keys = common + 0.2 * inside, common + 0.2 * keys
    else:
        queries = inside + (0.1 if kind == "sharp" else 0.3) * noise(1, coarse**3, 128)
    queries, keys = (4 * f / f.norm(dim=-1, keepdim=True) for f in (queries, keys))
    return queries, keys, grid


def measure_attention(kind: str, side: int) -> dict[str, Any]:
    queries, keys, grid = features(kind, side)
    half = queries.half().requires_grad_(), keys.half().requires_grad_()
    single = queries.requires_grad_(), keys.requires_grad_()
    upstream = torch.randn(1, queries.shape[1], 3, device="cuda")

    def forward(inputs: tuple[Tensor, Tensor]) -> Tensor:
        return coordinate_attention(*inputs, grid, bound=16.0)

    def backward(inputs: tuple[Tensor, Tensor]) -> None:
        torch.autograd.grad(forward(inputs), inputs, upstream)

    report: dict[str, Any] = {"features": kind, "queries": queries.shape[1], "keys": keys.shape[1], "width": 128}
    for name, inputs, repeats in (("ours", half, 20), ("plain", single, 3)):
        with torch.no_grad():
            ahead = milliseconds(functools.partial(forward, inputs), repeats)
        report[name] = {
            "forward_ms": ahead,
            "forward_backward_ms": milliseconds(functools.partial(backward, inputs), repeats),
        }
    report["accuracy"] = attention_accuracy(queries.detach(), keys.detach(), grid)
    return report


def attention_accuracy(queries: Tensor, keys: Tensor, grid: Grid, sample: int = 2048) -> dict[str, float]:
    """Our kernels against float64 for a sample of queries: distances in voxels, relative errors of gradients."""
    some = torch.randperm(queries.shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1))[:sample]
    inputs = queries[:, some].contiguous().requires_grad_(), keys.clone().requires_grad_()
    upstream = torch.randn(1, len(some), 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        answer = coordinate_attention(*inputs, grid, bound=16.0)
    ours = torch.autograd.grad(answer, inputs, upstream)
    answer = answer.detach()
    points = grid.points(torch.float64, "cuda").reshape(1, -1, 3)
    worst, total, gradients = 0.0, 0.0, [torch.zeros_like(t, dtype=torch.float64) for t in inputs]
    for rows in torch.arange(len(some), device="cuda").split(256):
        exact_inputs = inputs[0][:, rows].detach().double().requires_grad_(), keys.double().requires_grad_()
        exact = reference_attention(*exact_inputs, points)
        by_query, by_key = torch.autograd.grad(exact, exact_inputs, upstream[:, rows].double())
        gradients[0][:, rows] = by_query
        gradients[1] += by_key
        error = ((answer[:, rows] - exact.detach()) / torch.tensor(grid.spacing, device="cuda")).norm(dim=-1)
        worst, total = max(worst, float(error.max())), total + float(error.sum())
    relative = [float((a - b).norm() / b.norm()) for a, b in zip(ours, gradients, strict=True)]
    return {
        "worst_voxels": worst,
        "mean_voxels": total / len(some),
        "query_gradient_relative": relative[0],
        "key_gradient_relative": relative[1],
    }


def images(side: int, pairs: int, device: str) -> tuple[Tensor, Tensor]:
    """Smooth random images with structure at several scales."""
    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(2 * pairs, 1, side, side, side, device=device)
    for cells in (4, 8, 16):
        noise = torch.rand(2 * pairs, 1, cells, cells, cells, device=device, generator=generator)
        total += torch.nn.functional.interpolate(noise, size=(side,) * 3, mode="trilinear") / 3
    return total[:pairs], total[pairs:]


def trained_like(model: RegistrationAlgorithm, side: int, device: str) -> RegistrationAlgorithm:
    """Set refinements to move points by about two voxels. Initially they are zero and would hide errors."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, UNet):
            weight = module.last.weight
            weight.data = 20 / side / math.sqrt(weight[0].numel()) * torch.randn(weight.shape, generator=generator)
    return model.to(device)


def measure_forward(side: int) -> dict[str, Any]:
    moving, fixed = images(side, 1, "cuda")
    model = trained_like(carl(), side, "cuda").eval()

    def dense(precision: Precision) -> Tensor:
        with torch.no_grad(), mixed_precision(moving.device, precision):
            return model(moving, fixed).on_grid_of(fixed)

    fast, exact = dense("auto"), dense("float32")
    distance = ((fast - exact) * (side - 1)).norm(dim=-1)
    return {
        "side": side,
        "ours": {"ms": milliseconds(lambda: dense("auto"), 10), "peak_gb": peak_gb(lambda: dense("auto"))},
        "plain": {"ms": milliseconds(lambda: dense("float32"), 3), "peak_gb": peak_gb(lambda: dense("float32"))},
        "mean_distance_voxels": float(distance.mean()),
        "same_bits": bool(torch.equal(fast, dense("auto"))),
    }


def measure_step(
    model: RegistrationAlgorithm,
    side: int,
    *,
    pairs: int,
    train: bool = False,
    plain: bool = False,
    learning_rate: float = 1e-4,
) -> dict[str, Any]:
    """One step: both directions, loss, gradients and Adam."""
    moving, fixed = images(side, pairs, "cuda")
    model = trained_like(model, side, "cuda").train(train)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=not plain)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if plain:
            phi, inverse = model(moving, fixed), model(fixed, moving)
        else:
            with mixed_precision(moving.device):
                phi, inverse = model.both(moving, fixed)
        registration_loss(phi, inverse, moving, fixed, exact=plain).total.backward()
        optimizer.step()

    return {"side": side, "pairs": pairs, "ms": milliseconds(step, 2 if plain else 8), "peak_gb": peak_gb(step)}


def measure_training_step(side: int, pairs: int) -> dict[str, Any]:
    """One step as `training.train` runs it: the same, replayed as a CUDA graph."""
    moving, fixed = images(side, pairs, "cuda")
    model = trained_like(carl(refinements=2), side, "cuda").train()
    step = TrainingStep(model, Stage(1), device=moving.device)
    for _ in range(5):  # until the graph is captured
        step(Batch(moving, fixed), 1e-4, seed=0)
    return {"side": side, "pairs": pairs, "ms": milliseconds(lambda: step(Batch(moving, fixed), 1e-4, seed=0), 20)}


def measure_side(side: int) -> dict[str, Any]:
    moving, fixed = images(side, 1, "cuda")
    model = carl().cuda().eval()

    def both() -> list[Tensor]:
        with torch.no_grad(), mixed_precision(moving.device):
            forward, backward = model.both(moving, fixed)
            return [forward.on_grid_of(fixed), backward.on_grid_of(moving)]

    step = measure_step(carl(), side, pairs=1)
    return {
        "side": side,
        "both_directions_ms": milliseconds(both, 5),
        "both_directions_gb": peak_gb(both),
        "step_ms": step["ms"],
        "step_gb": step["peak_gb"],
    }


def measure_cpu(quick: bool) -> dict[str, Any]:
    side = 32 if quick else TRAINING
    moving, fixed = images(side, 1, "cpu")
    model = trained_like(carl(), side, "cpu").eval()

    def both() -> list[Transform]:
        with torch.no_grad():
            transforms = model.both(moving, fixed)
            for transform, image in zip(transforms, (fixed, moving), strict=True):
                transform.on_grid_of(image)
            return list(transforms)

    def plain() -> None:
        with torch.no_grad():
            for first, second in ((moving, fixed), (fixed, moving)):
                model(first, second).on_grid_of(second)

    seconds = [clock(both) for _ in range(2)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "threads": torch.get_num_threads(),
        "both_directions": {
            "side": side,
            "ours": {"seconds": min(seconds), "peak_resident_gb": memory},
            "one_after_the_other": {"seconds": clock(plain)},
        },
    }


# ---- how it is measured ---------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median time on the GPU."""
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 3)


def peak_gb(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 1e9, 3)


def clock(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return round(time.perf_counter() - start, 2)


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- figures --------------------------------------------------------------------------------------------------------


def plot(folder: Path) -> None:
    import matplotlib.pyplot as plt

    result = json.loads((folder / "gpu.json").read_text())
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    slowest = max(result["attention"], key=lambda a: a["ours"]["forward_backward_ms"])
    rows = {
        "attention\nforward": (slowest["ours"]["forward_ms"], slowest["plain"]["forward_ms"]),
        "attention\nforward,\nbackward": (
            slowest["ours"]["forward_backward_ms"],
            slowest["plain"]["forward_backward_ms"],
        ),
        "network\nforward": (result["forward"]["ours"]["ms"], result["forward"]["plain"]["ms"]),
        "optimisation\nstep": tuple(result["instance_optimisation_step"][k]["ms"] for k in ("ours", "plain")),
        "training\nstep": tuple(result["training_step"][k]["ms"] for k in ("ours", "plain")),
    }
    for offset, name, colour in ((-0.2, "plain float32", "0.7"), (0.2, "carlreg", "#d99a00")):
        heights = [pair[0 if name == "carlreg" else 1] for pair in rows.values()]
        bars = axes[0].bar([i + offset for i in range(len(rows))], heights, 0.4, label=name, color=colour)
        axes[0].bar_label(bars, fmt="%.0f", fontsize=7)
    axes[0].set(yscale="log", ylabel="milliseconds", title=f"{result['machine']}, side {FULL} (training {TRAINING})")
    axes[0].set_xticks(range(len(rows)), rows, fontsize=7)
    axes[0].legend()
    sides = [entry["side"] for entry in result["sweep"]]
    for axis, unit, title in ((axes[1], "ms", "time"), (axes[2], "gb", "peak memory")):
        for key, name in (("both_directions", "both directions"), ("step", "optimisation step")):
            axis.plot(sides, [entry[f"{key}_{unit}"] for entry in result["sweep"]], "o-", label=name)
        axis.set(xlabel="image side", ylabel={"ms": "milliseconds", "gb": "GB"}[unit], title=title, ylim=0)
        axis.legend()
    figure.savefig(folder / "gpu.png", dpi=110)


if __name__ == "__main__":
    main()
