"""Run `carl demo` as `make demo` does and keep its scores: Dice and true error before, after, and after a shift.

    python experiments/demo/run.py OUT

Writes demo.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from carlreg.files.atomic import write_atomically

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the demo's images and reports")
    out = parser.parse_args().out
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "carlreg", "demo", "--overwrite", "--out", str(out)], check=True)
    seconds = time.perf_counter() - start
    report = {
        "commit": commit(),
        "machine": machine(),
        "torch": torch.__version__,
        "command_seconds": round(seconds, 1),
        **json.loads((out / "demo.json").read_text(encoding="utf-8")),
    }
    write_atomically(HERE / "demo.json", (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
