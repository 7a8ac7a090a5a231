"""Landmark error on the lungs of POPI: CARL, ANTs and elastix, with and without lung masks.

    python experiments/lung/run.py ../shared/data work
    python experiments/lung/run.py ../shared/data work --methods ants elastix     # where these are installed

Inhale is fixed, exhale is moving. CARL runs as a user would run it, `carl register` with the default model, network
alone and with optimisation; with masks, both images are black outside of the lungs, as in the paper. POPI has no masks:
they are found by a threshold, and kept in the work folder. elastix is itk-elastix, an affine map and B-splines of 10 mm
with its default parameters; ANTs is SyNQuick. Results are kept in results/popi.json, a row for each method; those
already there are skipped. `--picture` draws the result of CARL as the paper's appendix does.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine, png

RESULTS = Path(__file__).with_name("results")
ROWS, PICTURE = RESULTS / "popi.json", RESULTS / "popi.png"
LUNG, BODY = -400.0, -500.0
"""HU below which voxels inside the body are lung, and below which those connected with the border are not body."""
EVERY = 6
"""Voxels between the lines of the grid in the picture."""
SEED = 0
Points = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path, help="a folder for results")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["unregistered", "carl", "carl_masked"])
    parser.add_argument("--picture", action="store_true", help="draw what is in the work folder; register nothing")
    arguments = parser.parse_args()
    scans = arguments.data / "lung" / "popi"
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.picture:
        draw(scans, arguments.work / "carl")
        return
    report: dict[str, Any] = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else {"rows": []}
    for name in arguments.methods:
        if any(row["method"] == name for row in report["rows"]):
            continue
        for row in METHODS[name](scans, arguments.work):
            made = {"commit": commit(), "machine": machine(), "seed": SEED}
            report["rows"].append({"method": name, **row, **made})
            print(json.dumps(report["rows"][-1]), flush=True)
        RESULTS.mkdir(exist_ok=True)
        ROWS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def landmarks(scans: Path, which: str) -> Points:
    """(40, 3), LPS in mm."""
    with (scans / f"{which}_landmarks.csv").open(newline="") as stream:
        return np.array([[float(row[axis]) for axis in "xyz"] for row in csv.DictReader(stream)])


def errors(scans: Path, found: Points) -> dict[str, float]:
    """The distances in mm of points found for the landmarks of inhale from those of exhale."""
    apart = np.linalg.norm(found - landmarks(scans, "exhale"), axis=1)
    names = {"mean_mm": apart.mean(), "std_mm": apart.std(), "median_mm": np.median(apart), "most_mm": apart.max()}
    return {name: round(float(value), 3) for name, value in names.items()}


def unregistered(scans: Path, work: Path) -> list[dict[str, Any]]:
    return [{"stage": "", **errors(scans, landmarks(scans, "inhale"))}]


# ---- CARL -----------------------------------------------------------------------------------------------------------


def carl(scans: Path, work: Path) -> list[dict[str, Any]]:
    return [register(scans, scans, work / "carl", stage) for stage in ("network", "optimised")]


def carl_masked(scans: Path, work: Path) -> list[dict[str, Any]]:
    """Both images black outside of the lungs, from −1000 to 0 HU."""
    from carlreg.files.images import read, write

    folder = work / "masked"
    folder.mkdir(exist_ok=True)
    for which in ("inhale", "exhale"):
        image = read(scans / f"{which}.nii.gz")
        lungs = lung_mask(image.data)
        data = np.where(lungs, image.data.clip(-1000, 0), -1000).astype(np.int16)
        write(replace(image, data=data), folder / f"{which}.nii.gz", overwrite=True)
    return [register(folder, scans, work / "carl_masked", stage) for stage in ("network", "optimised")]


def lung_mask(hu: Points) -> Points:
    """Air inside of the body, holes of up to about 2 cm filled."""
    sitk: Any = import_module("SimpleITK")

    dark = sitk.GetImageFromArray((hu < BODY).astype(np.uint8))
    parts = sitk.GetArrayFromImage(sitk.ConnectedComponent(dark))
    sides = [parts.take(end, axis=axis).ravel() for axis in range(2) for end in (0, -1)]  # lungs may reach the ends
    inside = (hu < LUNG) & ~np.isin(parts, np.setdiff1d(np.concatenate(sides), [0]))
    closed = sitk.BinaryMorphologicalClosing(sitk.GetImageFromArray(inside.astype(np.uint8)), [5, 5, 5])
    sizes = sitk.RelabelComponent(sitk.ConnectedComponent(closed), minimumObjectSize=20_000)
    return sitk.GetArrayFromImage(sizes) > 0


def register(images: Path, scans: Path, out: Path, stage: str) -> dict[str, Any]:
    words = ["--fixed", images / "inhale.nii.gz", "--moving", images / "exhale.nii.gz", "-o", out / stage]
    words += ["--fixed-landmarks", scans / "inhale_landmarks.csv", "--moving-landmarks", scans / "exhale_landmarks.csv"]
    words += ["--confidence", "off", "--seed", SEED, "--overwrite", "--quiet"]
    words += ["--io-iterations", 0, "--no-allow-identity"] if stage == "network" else []
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "carlreg", "register", *map(str, words)], check=True)
    seconds = time.perf_counter() - begin
    found = points_of(scans, out / stage)
    report = json.loads((out / stage / "report.json").read_text(encoding="utf-8"))
    row = {"stage": stage, **errors(scans, found), "folds_percent": report["metrics"]["folds_percent"]}
    return row | {"seconds": round(seconds, 1), "model": report["model"]["sha256"]}


def points_of(scans: Path, folder: Path) -> Points:
    """Where a result takes the landmarks of inhale, by `carl warp-points`."""
    out = folder / "landmarks.csv"
    words = ["-t", folder, "-p", scans / "inhale_landmarks.csv", "-o", out, "--from", "fixed", "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-m", "carlreg", "warp-points", *map(str, words)], check=True)
    with out.open(newline="") as stream:
        return np.array([[float(row[axis]) for axis in "xyz"] for row in csv.DictReader(stream)])


# ---- others ---------------------------------------------------------------------------------------------------------


def ants(scans: Path, work: Path) -> list[dict[str, Any]]:
    program: Any = import_module("ants")
    pandas: Any = import_module("pandas")

    fixed, moving = (program.image_read(str(scans / f"{which}.nii.gz")) for which in ("inhale", "exhale"))
    begin = time.perf_counter()
    found = program.registration(fixed, moving, "antsRegistrationSyNQuick[s]", random_seed=SEED + 1)
    seconds = time.perf_counter() - begin
    table = pandas.DataFrame(landmarks(scans, "inhale"), columns=list("xyz"))
    moved = program.apply_transforms_to_points(3, table, found["fwdtransforms"])
    values = np.asarray(moved)[:, :3]
    row = {"stage": "SyNQuick", **errors(scans, values), "seconds": round(seconds, 1)}
    return [row | {"version": program.__version__}]


def elastix(scans: Path, work: Path) -> list[dict[str, Any]]:
    itk: Any = import_module("itk")

    fixed, moving = (itk.imread(str(scans / f"{which}.nii.gz"), itk.F) for which in ("inhale", "exhale"))
    parameters = itk.ParameterObject.New()
    parameters.AddParameterMap(parameters.GetDefaultParameterMap("affine", 4))
    parameters.AddParameterMap(parameters.GetDefaultParameterMap("bspline", 4, 10.0))
    begin = time.perf_counter()
    _, found = itk.elastix_registration_method(fixed, moving, parameter_object=parameters, log_to_console=False)
    seconds = time.perf_counter() - begin
    folder = work / "elastix"
    folder.mkdir(exist_ok=True)
    wanted = landmarks(scans, "inhale")
    lines = "\n".join(" ".join(f"{value:.6f}" for value in point) for point in wanted)
    (folder / "points.txt").write_text(f"point\n{len(wanted)}\n{lines}\n")
    itk.transformix_filter(
        moving,
        found,
        fixed_point_set_file_name=str(folder / "points.txt"),
        output_directory=str(folder),
        log_to_console=False,
    )
    text = (folder / "outputpoints.txt").read_text().splitlines()
    values = np.array([line.split("OutputPoint = [")[1].split("]")[0].split() for line in text], dtype=float)
    row = {"stage": "affine and B-splines", **errors(scans, values), "seconds": round(seconds, 1)}
    return [row | {"version": itk.__version__}]


METHODS: dict[str, Callable[[Path, Path], list[dict[str, Any]]]] = {
    "unregistered": unregistered,
    "carl": carl,
    "carl_masked": carl_masked,
    "ants": ants,
    "elastix": elastix,
}


# ---- picture --------------------------------------------------------------------------------------------------------


def draw(scans: Path, folder: Path) -> None:
    """A coronal slice of exhale, of exhale after registration, of where a regular grid goes, and of inhale."""
    import matplotlib.pyplot as plt

    from carlreg.files import transform_files
    from carlreg.files.images import read

    fixed, moving = (read(scans / f"{which}.nii.gz") for which in ("inhale", "exhale"))
    warped = read(folder / "optimised" / "warped.nii.gz")
    transform = transform_files.read(folder / "optimised" / "transform.h5")
    height = fixed.shape[1] // 2
    index = np.stack(np.meshgrid(*(np.arange(0, n, EVERY) for n in fixed.shape[::2]), indexing="ij"), axis=-1)
    voxels = np.insert(index.astype(float), 1, height, axis=-1)
    points = voxels @ fixed.affine[:3, :3].T + fixed.affine[:3, 3]
    moved = np.asarray(transform(points.reshape(-1, 3))).reshape(points.shape)
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.0), layout="constrained")
    shown = {"exhale, moving": moving, "exhale, registered": warped, "inhale, fixed": fixed}
    for axis, (title, image) in zip(axes[[0, 1, 3]], shown.items(), strict=True):
        data = image.data[:, min(height, image.shape[1] - 1)].T
        axis.imshow(data, cmap="gray", vmin=-1000, vmax=300, origin="lower", aspect=image.spacing[2] / image.spacing[0])
        axis.set_title(title, fontsize=9)
    for lines in (moved, moved.swapaxes(0, 1)):
        axes[2].plot(*np.moveaxis(lines[..., [0, 2]], -1, 0), color="black", linewidth=0.6)
    axes[2].set_aspect("equal")
    axes[2].set_title("where a grid of inhale goes", fontsize=9)
    for axis in axes:
        axis.axis("off")
    RESULTS.mkdir(exist_ok=True)
    PICTURE.write_bytes(png(figure, 110))


if __name__ == "__main__":
    main()
