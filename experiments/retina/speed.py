"""Measure how fast the retina networks train, and what limits it.

    python experiments/retina/speed.py OUT --commit COMMIT

Each network's step (10 pairs of the experiment's size, both directions, GradICON) is timed for a single run and for
several runs in parallel, as in train.py. One step without a CUDA graph is profiled: the number of its kernels, their
total time on the GPU, and the longest of them. Writes speed.json.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from train import BATCH, NETWORKS, RATE  # type: ignore[import-not-found]

from carlreg.files.atomic import write_atomically
from carlreg.training.batches import Batch
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

SHAPE = (196, 141)
"""Shape of the experiment's images."""
TOGETHER = (1, 3, 6)


class Runs:
    """Networks in training, each with its own stream."""

    def __init__(self, network: str, count: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.moving, self.fixed = (torch.rand(BATCH, 1, *SHAPE, device=device) for _ in range(2))
        stage = Stage(1, learning_rate=RATE)
        self.steps = [TrainingStep(NETWORKS[network]().to(device).train(), stage, device=device) for _ in range(count)]
        self.streams = [torch.cuda.Stream() for _ in self.steps]
        for step, stream in zip(self.steps, self.streams, strict=True):
            self.go(step, stream, 5)

    def go(self, step: TrainingStep, stream: torch.cuda.Stream, count: int) -> None:
        with torch.cuda.stream(stream):
            for n in range(count):
                step(Batch(self.moving, self.fixed), RATE, seed=n)
        stream.synchronize()

    def per_second(self, count: int) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(self.steps)) as pool:
            list(pool.map(lambda step, stream: self.go(step, stream, count), self.steps, self.streams))
        return len(self.steps) * count / (time.perf_counter() - start)


def kernels(network: str, device: torch.device) -> dict[str, Any]:
    """The kernels of one step: their number, total time, and the longest ones."""
    runs = Runs(network, 1, device)
    step = TrainingStep(
        NETWORKS[network]().to(device).train(), Stage(1, learning_rate=RATE), device=device, graphs=False
    )
    for n in range(3):
        step(Batch(runs.moving, runs.fixed), RATE, seed=n)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(Batch(runs.moving, runs.fixed), RATE, seed=3)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if "CUDA" in str(event.device_type)]
    spent: dict[str, float] = {}
    for event in events:
        spent[event.name] = spent.get(event.name, 0.0) + event.device_time / 1e3
    longest = sorted(spent.items(), key=lambda item: -item[1])[:5]
    return {
        "kernels": len(events),
        "kernel_ms": round(sum(spent.values()), 2),
        "shorter_than_10_us": sum(event.device_time < 10 for event in events),
        "longest": [{"name": name[:80], "ms": round(ms, 3)} for name, ms in longest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this script measures the speed of a GPU, but there is none")
    device = torch.device("cuda")
    report: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seed": 0,
        "batch": BATCH,
        "shape": SHAPE,
        "networks": {},
    }
    for network in NETWORKS:
        speeds = {str(count): round(Runs(network, count, device).per_second(arguments.steps), 1) for count in TOGETHER}
        report["networks"][network] = {"steps_per_second": speeds, **kernels(network, device)}
        print(network, report["networks"][network], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out / "speed.json", (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
