"""What the scripts of this folder share: commands, rows, and the file of results."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from made import commit, machine  # type: ignore[import-not-found]

from carlreg.files.atomic import write_atomically

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SOURCE = str(HERE.parent.parent / "src")


def keep(part: str, values: dict[str, Any], **more: Any) -> None:
    """Add a part to the file of results, with its commit and its machine."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    load = round(os.getloadavg()[0], 1)  # an idle machine has 0 before it is measured, and the work itself now
    held[part] = {"commit": commit(), "machine": machine(), "load_average": load, **more, **values}
    write_atomically(RESULTS, (json.dumps(held, indent=2) + "\n").encode())
    print(json.dumps({part: held[part]}, indent=2))


def carl(*words: object, threads: int | None = None, cores: set[int] | None = None) -> subprocess.Popen[bytes]:
    """Start a command, with so many threads, on these cores. EXTRA is a folder of packages that are not installed."""
    limit = [] if threads is None else ["--threads", str(threads)]
    pinned = None if cores is None else lambda: os.sched_setaffinity(0, cores)
    paths = [SOURCE, *filter(None, [os.environ.get("EXTRA"), os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "carlreg", *map(str, words), *limit]
    return subprocess.Popen(command, env=environment, preexec_fn=pinned, stderr=subprocess.DEVNULL)


def seconds_of(process: subprocess.Popen[bytes], start: float) -> float:
    """Wait for a command that must not fail; the seconds since `start`."""
    if process.wait():
        raise SystemExit(f"{process.args!r} failed with exit code {process.returncode}")
    return round(time.monotonic() - start, 2)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shown(out: Path) -> list[dict[str, Any]]:
    """The rows of the gallery."""
    text = (out / "index.html").read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    found: list[dict[str, Any]] = json.loads(text[start : text.index("</script>", start)])["rows"]
    return found


def bits(out: Path) -> dict[str, str]:
    """Checksums of transforms and images; reports hold times."""
    files = (path for path in out.glob("*/*") if path.suffix in (".h5", ".gz"))
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def tiny(work: Path, count: int, side: int = 24) -> tuple[Path, Path]:
    """A folder with so many synthetic images, and a tiny network that has learnt nothing: for the machinery alone."""
    import numpy as np
    import torch

    import carlreg
    from carlreg.files import images

    folder, model = work / f"images-{count}", work / "tiny.safetensors"
    if not model.exists():
        torch.manual_seed(0)
        network = carlreg.gradicon(3, 2, unet_down=(2, 4, 4, 4, 4), unet_up=(4, 4, 4, 4, 4))
        work.mkdir(parents=True, exist_ok=True)
        carlreg.save(network, model, metadata={"grid": "16 16 16"})
    folder.mkdir(parents=True, exist_ok=True)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 3, indexing="ij"))
    for number in range(count):
        path = folder / f"s{number:03}.nii.gz"
        if not path.exists():
            rng = np.random.default_rng(number)
            blob = np.exp(-4 * ((grid - rng.uniform(-0.2, 0.2, (3, 1, 1, 1))) ** 2).sum(0))
            images.write(images.from_array((1000 * blob + 20 * rng.random(blob.shape)).astype(np.int16)), path)
    return folder, model
