"""How far verdicts can be trusted: collect evidence and truth about many pairs, and fit the calibration of a model.

    python experiments/confidence/run.py collect ../shared/data rows.jsonl --seconds 230 --workers 12 --mps
    python experiments/confidence/run.py fit rows.jsonl
    python experiments/confidence/run.py orientation ../shared/data               # headers
    python experiments/confidence/run.py ladder ../shared/data ladder.jsonl --workers 12 --mps
    python experiments/confidence/run.py pack ../shared/data archives --most-mib 18     # to collect elsewhere
    python experiments/confidence/run.py unpack archives/*.tar --data data

`collect` registers intact pairs of every set and deliberate failures of many kinds, of training subjects and of
validation subjects, in an order of which every beginning is balanced, and adds a line to the file after each. `fit`
fits on training subjects, tests on validation subjects, and writes the calibration beside the weights, and results.json
and plots beside this script.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="put the scans that collect reads into small archives")
    packing.add_argument("data", type=Path)
    packing.add_argument("out", type=Path, help="a folder")
    packing.add_argument("--most-mib", type=float, default=math.inf, help="the size of an archive, at most")
    unpacking = commands.add_parser("unpack", help="make the folders of data again, from some or all archives")
    unpacking.add_argument("archives", type=Path, nargs="+")
    unpacking.add_argument("--data", type=Path, required=True)
    collecting = commands.add_parser("collect", help="register pairs, and write evidence and truth")
    collecting.add_argument("data", type=Path)
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--seconds", type=float, default=float("inf"))
    collecting.add_argument("--limit", type=int, help="tasks at most")
    collecting.add_argument("--sets", nargs="+", default=[])
    collecting.add_argument("--kinds", nargs="+", default=[])
    collecting.add_argument("--split", choices=["train", "val"])
    collecting.add_argument("--model", default="default")
    collecting.add_argument("--device", default="auto")
    collecting.add_argument("--workers", type=int, default=1, help="processes")
    collecting.add_argument("--mps", action="store_true", help="let processes use the GPU side by side, if it can")
    collecting.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    collecting.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    collecting.add_argument("--resume", action="store_true", help="skip tasks that the file has")
    headers = commands.add_parser("orientation", help="measure how often mirrored and turned headers are named")
    headers.add_argument("data", type=Path)
    headers.add_argument("--out", type=Path, default=Path(__file__).with_name("orientation.json"))
    headers.add_argument("--split", choices=["train", "val"], default="val")
    headers.add_argument(
        "--sets", nargs="+", default=["brain", "abdomen", "abdomen_mr", "cardiac", "hippocampus", "lung"]
    )
    headers.add_argument("--pairs", type=int, default=3, help="altered pairs of each set")
    headers.add_argument("--unaltered", type=int, default=24, help="unaltered pairs of each set")
    headers.add_argument("--resume", action="store_true", help="skip what the file has")
    headers.add_argument("--seconds", type=float, default=float("inf"))
    headers.add_argument("--device", default="auto")
    climbing = commands.add_parser("ladder", help="measure what the ladder gains, once the model is calibrated")
    climbing.add_argument("data", type=Path)
    climbing.add_argument("rows", type=Path)
    climbing.add_argument("--seconds", type=float, default=float("inf"))
    climbing.add_argument("--limit", type=int, help="pairs at most")
    climbing.add_argument("--model", default="default")
    climbing.add_argument("--device", default="auto")
    climbing.add_argument("--workers", type=int, default=1, help="processes")
    climbing.add_argument("--mps", action="store_true", help="let processes use the GPU side by side, if it can")
    climbing.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    climbing.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    climbing.add_argument("--summarise", action="store_true", help="of rows that were made before")
    fitting = commands.add_parser("fit", help="fit and test the calibration")
    fitting.add_argument("rows", type=Path, nargs="+")
    fitting.add_argument("--model", default="default")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        from experiments.confidence import pack

        pack.pack(arguments.data, arguments.out, arguments.most_mib)
    elif arguments.command == "unpack":
        from experiments.confidence import pack

        pack.unpack(arguments.archives, arguments.data)
    elif arguments.command == "collect":
        from experiments.confidence import collect

        collect.run(arguments)
    elif arguments.command == "orientation":
        from experiments.confidence import orientation

        orientation.run(arguments)
    elif arguments.command == "ladder":
        from experiments.confidence import ladder

        ladder.run(arguments)
    else:
        from experiments.confidence import fit

        fit.run(arguments)


if __name__ == "__main__":
    main()
