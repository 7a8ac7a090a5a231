"""Run `carl train` on hippocampi as a new user would: one command on a CSV file; then the same, killed and resumed.

    python experiments/training/run.py ../shared/data/hippocampus OUT --steps 600

Trains one network without interruption, and another one that is killed halfway (SIGKILL) and resumed by the same
command; compares the losses of the two runs step by step. Writes training.json and curves.png into `--results`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from carlreg.files.atomic import write_atomically

RESULTS = Path(__file__).with_name("results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with `train` and `val`")
    parser.add_argument("out", type=Path, help="folder for the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--diffusion-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", default="small")
    parser.add_argument("--most", type=int, help="use at most N images of each split, to try the script")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = arguments.out / "scans.csv"
    write_table(arguments.data, table, arguments.most)
    settings = {
        "diffusion-steps": arguments.diffusion_steps,
        "steps": arguments.steps,
        "size": arguments.size,
        "rate": 3e-4,
        "log-every": 10,
        "save-every": 100,
        "validate-every": 200,
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "carlreg", "train", str(table), "--cache", str(arguments.out / "cache"), *options]
    unbroken, broken = arguments.out / "unbroken", arguments.out / "broken"
    started = time.monotonic()
    subprocess.run([*command, "--out", str(unbroken)], check=True)
    seconds = time.monotonic() - started
    killed_at = start_and_kill([*command, "--out", str(broken)], broken, arguments.steps)
    subprocess.run([*command, "--out", str(broken)], check=True)
    logs = [read_log(folder) for folder in (unbroken, broken)]
    losses = [{step: entry["losses"]["total"] for step, entry in log.items() if "losses" in entry} for log in logs]
    scores = [[entry["validation"] for entry in log.values() if "validation" in entry] for log in logs]
    on_gpu = torch.cuda.is_available()
    report: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "seed": 0,
        "command": "carl train scans.csv " + " ".join(options),
        "images": json.loads((unbroken / "config.json").read_text(encoding="utf-8"))["data"]["training"]["images"],
        "seconds": round(seconds, 1),
        "steps_per_second": round(speed(logs[0]), 1),
        "killed_at": killed_at,
        "same_steps_logged": losses[0].keys() == losses[1].keys(),
        "largest_difference_of_loss": max(abs(losses[0][step] - losses[1][step]) for step in losses[0]),
        "dice": {"unbroken": scores[0], "broken": scores[1]},
        "losses": {"unbroken": list(losses[0].values()), "broken": list(losses[1].values())},
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.results / "training.json", (json.dumps(report, indent=1) + "\n").encode())
    print({key: value for key, value in report.items() if key != "losses"})
    plot(report, arguments.results / "curves.png")


def write_table(data: Path, table: Path, most: int | None) -> None:
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "labels", "split"))
        for split in ("train", "val"):
            scans = sorted(p for p in (data / split).glob("*.nii.gz") if not p.name.endswith("_labels.nii.gz"))
            for scan in scans[:most]:
                labels = scan.with_name(scan.name.replace(".nii.gz", "_labels.nii.gz"))
                writer.writerow((scan.resolve(), labels.resolve() if split == "val" else "", split))


def start_and_kill(command: list[str], folder: Path, steps: int) -> dict[str, int]:
    """Kill the run halfway through its second stage, between two checkpoints; return the stage and step it reached."""
    process = subprocess.Popen(command)
    while process.poll() is None:
        log = read_log(folder)
        stage, step = max(log, default=(0, 0))
        if stage == 1 and step >= 0.58 * steps:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return {"stage": stage, "step": step}
        time.sleep(0.05)
    raise SystemExit(f"the run ended with exit code {process.returncode} before it could be killed")


def read_log(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Log entries by stage and step, ignoring an incomplete last line."""
    entries: dict[tuple[int, int], dict[str, Any]] = {}
    path = folder / "log.jsonl"
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                entries.setdefault((entry["stage"], entry["step"]), {}).update(entry)
    return entries


def speed(log: dict[tuple[int, int], dict[str, Any]]) -> float:
    """Steps per second in the second stage, between two validations."""
    timed = [(step, entry["seconds"]) for (stage, step), entry in log.items() if stage == 1 and "seconds" in entry]
    inside = [pair for pair in timed if 220 <= pair[0] <= 390] or timed
    (first, start), (last, end) = inside[0], inside[-1]
    return (last - first) / (end - start)


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for (name, values), style in zip(report["losses"].items(), ("-", "--"), strict=True):
        axis.plot([10 * (n + 1) for n in range(len(values))], values, style, label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
