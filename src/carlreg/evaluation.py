"""How good registrations are, of whatever method: transforms in, figures out.

Everything is measured in the fixed image's own space: labels are warped onto the fixed grid taking the nearest voxel,
distances are millimetres, determinants those of the map between the two worlds. A method is a function that makes of a
pair a `Result`; results of other programs come in by their files.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg import images, itk
from carlreg.datasets.tables import FILES, Pair, stem
from carlreg.images import Image, PathLike, _sitk, map_points
from carlreg.itk import ItkTransform, WorldTransform, invert_matrix
from carlreg.metrics import dice, hd95, mean_score, spread_of_log
from carlreg.models import write_atomically

WorldMap = WorldTransform | ItkTransform
FIGURES = {
    "dice": "Dice",
    "hd95_mm": "HD95, mm",
    "tre_mm": "TRE, mm",
    "folds_percent": "% |J| < 0",
    "sd_log_jacobian": "SDlogJ",
    "inverse_consistency_mm": "inverse, mm",
    "seconds": "s",
    "peak_gib": "GiB",
}
"""What is measured of each pair, and its heading in a table."""
HIGHER_IS_BETTER = ("dice",)
BAD_INPUT = (ValueError, TypeError, OSError, RuntimeError, ImportError, ArithmeticError, LookupError, MemoryError)


# ---- results and where they come from -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Result:
    """What a method made of a pair: T from fixed to moving world points, and what it took."""

    transform: WorldMap
    inverse: itk.PointMap | None = None
    seconds: float = math.nan
    peak_gib: float = math.nan
    inverse_consistency_mm: float = math.nan
    """Where the method says it itself; otherwise it is measured, if there is an inverse."""


Method = Callable[[Pair, Image, Image], Result]
"""A pair and its fixed and moving image to a result."""


def identity(pair: Pair, fixed: Image, moving: Image) -> Result:
    """Before registration: the two worlds as their headers have them."""
    dim = fixed.dim
    still = WorldTransform(np.eye(dim + 1), np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1))
    return Result(still, still)


def listed(pair: Pair, fixed: Image, moving: Image) -> Result:
    """The files in the pair's columns `transform` and `inverse`."""
    if not pair.transform:
        raise ValueError("no result is given; expected its file in the column 'transform'")
    return _from_files(pair.transform, pair.inverse, fixed, moving)


def from_list(pairs: Sequence[Pair]) -> Method:
    """The files that another list of pairs gives for the same images, or for a pair of the same name."""
    by_images = {(_absolute(pair.fixed), _absolute(pair.moving)): pair for pair in pairs}
    by_name = {pair.name: pair for pair in pairs}

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        found = by_images.get((_absolute(pair.fixed), _absolute(pair.moving)), by_name.get(pair.name))
        if found is None:
            raise ValueError("the list of results does not have it; expected the same images in a row of it")
        return listed(found, fixed, moving)

    return find


def in_folder(folder: PathLike) -> Method:
    """Results in a folder: each pair's in a folder of its name, as `carl register` or ANTs write them, or in a file.

    Folders of `carl register` are also known by the images that their report names.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected a folder of results, a CSV of pairs or a model")
    reported = {}
    for report in sorted(root.glob("**/report.json")):
        inputs = _read_json(report).get("inputs", {})
        reported[tuple(_absolute(_path(inputs, side)) for side in ("fixed", "moving"))] = report.parent

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        place = reported.get((_absolute(pair.fixed), _absolute(pair.moving)), root / pair.name)
        forward, backward = _find_files(place, root, pair)
        if not forward:
            raise ValueError(f"{root} holds no result for it; expected {pair.name}/transform.h5, say")
        return _from_files(forward, backward, fixed, moving)

    return find


def _from_files(forward: Sequence[Path], backward: Sequence[Path], fixed: Image, moving: Image) -> Result:
    inverse: itk.PointMap | None = None
    if len(backward) == 2 and backward[0].suffix == ".mat":  # ANTs: the affine part is to be inverted, the warp is
        affine, warp = itk.read(backward[0]), itk.read(backward[1])
        if isinstance(affine, WorldTransform):
            undo = invert_matrix(affine.affine)
            inverse = lambda points: warp(map_points(undo, points))  # noqa: E731
    elif backward:
        inverse = read_result(backward, moving)
    return Result(read_result(forward, fixed), inverse, **_told(forward[0].parent))


def by_model(model: str, *, save: PathLike | None = None, **options: Any) -> Method:
    """Register again, by `carlreg.register` with these options. Results are kept in `save`, a folder a pair.

    Time is that of the whole call, the reading of the images included.
    """

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        from carlreg.product import register

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # By their paths, so that the report names them; what SimpleITK cannot read is given as it was read.
        files = {"fixed": pair.fixed, "moving": pair.moving}
        inputs: dict[str, Any] = files if pair.read_image is images.read else {"fixed": fixed, "moving": moving}
        masks = {f"{side}_mask": getattr(pair, f"{side}_mask") for side in files}
        started = time.perf_counter()
        registration = register(**inputs, model=model, **masks, **options)
        seconds = time.perf_counter() - started
        if save is not None:
            registration.save(Path(save) / pair.name, overwrite=True)
        consistency = registration.metrics.get("inverse_consistency_mm", math.nan)
        return Result(registration.transform, registration.inverse, seconds, peak_memory(), consistency)

    return run


def peak_memory() -> float:
    """GiB: of the GPU since its count was reset, where there is one; otherwise the most this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def read_result(files: Sequence[Path], fixed: Image) -> WorldMap:
    """T from the files of a result: a transform of ITK's, displacements in millimetres on the fixed grid, ANTs' pair of
    both, or displacements in voxels as Learn2Reg wants them, (*shape, D) in a plain NIfTI image."""
    if len(files) == 1 and itk.is_learn2reg(files[0]):
        return itk.read_learn2reg(files[0], fixed)
    found = itk.read(list(files))
    dim = found.dim if isinstance(found, WorldTransform) else found.transform.GetDimension()
    if dim != fixed.dim:
        raise ValueError(f"{files[0]} is a {dim}-D transform for {fixed.dim}-D images; expected the same")
    if isinstance(found, WorldTransform) and max(found.displacement.shape[:-1]) > 1:
        _check_cover(found, files[0], fixed)
    return found


def _check_cover(transform: WorldTransform, path: Path, fixed: Image) -> None:
    shape = transform.displacement.shape[:-1]
    if path.name.lower().endswith((".nii", ".nii.gz")) and shape != fixed.shape:
        raise ValueError(f"{path} has {_times(shape)} voxels; expected {_times(fixed.shape)}, as the fixed image has")
    ends = np.stack(np.meshgrid(*([0, n - 1] for n in fixed.shape), indexing="ij"), axis=-1).reshape(-1, fixed.dim)
    index = map_points(invert_matrix(transform.lattice), map_points(fixed.affine, ends))
    if ((index < -1) | (index > np.array(shape))).any():
        raise ValueError(
            f"{path} has displacements on {_times(shape)} points that do not cover the fixed image of "
            f"{_times(fixed.shape)} voxels; expected a result for this pair"
        )


def _find_files(place: Path, root: Path, pair: Pair) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files of T and of its inverse: in the pair's own folder, or in the common one with the pair in their name."""
    ids = "_".join(re.sub(r"^\D+_?|_0000$", "", stem(path or "")) for path in (pair.fixed, pair.moving))
    candidates = [
        ([place / "transform.h5"], [place / "inverse_transform.h5"]),
        ([place / "warp.nii.gz"], [place / "inverse_warp.nii.gz"]),
        *(
            ([warp, affine], [affine, Path(f"{start}1InverseWarp.nii.gz")])
            for warp in sorted(place.glob("*1Warp.nii.gz"))
            for start in [str(warp)[: -len("1Warp.nii.gz")]]
            for affine in [Path(f"{start}0GenericAffine.mat")]
        ),
        *(([root / f"{pair.name}{ending}"], []) for ending in (".h5", ".tfm", ".nii.gz")),
        ([root / f"disp_{ids}.nii.gz"], []),  # Learn2Reg's names have the fixed image first
    ]
    for forward, backward in candidates:
        if all(path.is_file() for path in forward):
            return tuple(forward), tuple(backward) if all(path.is_file() for path in backward) else ()
    return (), ()


def _told(folder: Path) -> dict[str, float]:
    """What the report beside a result says of it."""
    report = _read_json(folder / "report.json")
    metrics, seconds, memory = (report.get(key) or {} for key in ("metrics", "seconds", "peak_memory_gb"))
    found = {
        "seconds": seconds.get("total", metrics.get("seconds")),
        "peak_gib": memory.get("gpu", memory.get("process", metrics.get("peak_gib"))),
        "inverse_consistency_mm": metrics.get("inverse_consistency_mm"),
    }
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def pairs_of(folder: PathLike) -> list[Pair]:
    """The pairs that a folder of results of `carl register` is about, by the files that the reports name."""
    pairs = []
    for report in sorted(Path(folder).glob("**/report.json")):
        inputs = _read_json(report).get("inputs", {})
        name = str(report.parent.relative_to(folder)) if report.parent != Path(folder) else stem(folder)
        files: dict[str, Any] = {column: _path(inputs, column) for column in FILES}
        pairs.append(Pair(name, **files))
    if not pairs:
        raise ValueError(f"{folder} holds no report.json of `carl register`; expected results, or give a CSV of pairs")
    return pairs


def _path(inputs: dict[str, Any], name: str) -> Path | None:
    """The file of an input, as a report names it."""
    described = inputs.get(name, {})
    path = described.get("path", described.get("name"))
    return Path(path) if path else None


def _absolute(path: PathLike | None) -> str | None:
    return None if path is None else os.path.realpath(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- one pair -------------------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """What was measured of one pair and one method; NaN where there was nothing to measure."""

    method: str
    pair: str
    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, math.nan))
    dice: dict[int, float] = field(default_factory=dict)
    hd95_mm: dict[int, float] = field(default_factory=dict)
    tre_mm: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {
            "method": self.method,
            "pair": self.pair,
            **{key: _number(value) for key, value in self.figures.items()},
            "dice_per_label": {str(label): _number(score) for label, score in self.dice.items()},
            "hd95_mm_per_label": {str(label): _number(score) for label, score in self.hd95_mm.items()},
            "tre_mm_per_landmark": [_number(error) for error in self.tre_mm],
            "failures": self.failures,
        }


def score(
    pair: Pair, method: Method, *, name: str = "", labels: Sequence[int] | None = None, partial: bool = False
) -> Scores:
    """Measure a method on a pair. What cannot be measured is named in `failures`; the rest is there.

    `labels` are those to score, by default all but 0 that occur. A label that only one of the two maps has is not
    scored, as in Learn2Reg, and is a failure unless `partial`. One that the transform loses has Dice 0 and no HD95.
    """
    scores = Scores(name, pair.name)

    def attempt(measure: Callable[[], None]) -> bool:
        try:
            measure()
        except BAD_INPUT as error:
            scores.failures.append(" ".join(str(error).split()))
            return False
        return True

    found: dict[str, Any] = {}

    def load() -> None:
        found["fixed"], found["moving"] = pair.image("fixed"), pair.image("moving")
        if found["fixed"].dim != found["moving"].dim:
            raise ValueError(f"the fixed image is {found['fixed'].dim}-D, the moving one is not; expected the same")
        result = method(pair, found["fixed"], found["moving"])
        found["result"], found["dense"] = result, _dense(result.transform, found["fixed"])
        scores.figures.update(
            seconds=result.seconds,
            peak_gib=result.peak_gib,
            inverse_consistency_mm=result.inverse_consistency_mm,
        )

    if not attempt(load):
        return scores
    fixed, moving, result = found["fixed"], found["moving"], found["result"]
    attempt(lambda: _score_labels(scores, pair, fixed, moving, found["dense"], labels, partial))
    attempt(lambda: _score_landmarks(scores, pair, fixed, moving, result.transform))
    attempt(lambda: _score_determinants(scores, found["dense"], fixed))
    if result.inverse is not None and math.isnan(result.inverse_consistency_mm):
        error = _inconsistency(result.transform, result.inverse, fixed, moving)
        scores.figures["inverse_consistency_mm"] = error
    return scores


def _score_labels(
    scores: Scores,
    pair: Pair,
    fixed: Image,
    moving: Image,
    transform: WorldTransform,
    labels: Sequence[int] | None,
    partial: bool,
) -> None:
    given = {"fixed": pair.fixed_seg, "moving": pair.moving_seg}
    if all(path is None for path in given.values()):
        return
    for side, path in given.items():
        if path is None:
            raise ValueError(f"there are labels on one side only, not for the {side} image; expected {side}_seg")
    assert pair.fixed_seg is not None
    assert pair.moving_seg is not None
    maps = {"fixed": images.read_labels(pair.fixed_seg), "moving": images.read_labels(pair.moving_seg)}
    for side, image in (("fixed", fixed), ("moving", moving)):
        if maps[side].shape != image.shape:
            raise ValueError(
                f"{maps[side].name} has {_times(maps[side].shape)} voxels; expected {_times(image.shape)}, as the "
                f"{side} image has"
            )
    present = {side: set(np.unique(map_.data).tolist()) - {0} for side, map_ in maps.items()}
    wanted = sorted(present["fixed"] | present["moving"]) if labels is None else list(labels)
    for label in wanted:
        missing = [side for side in maps if label not in present[side]]
        if missing and not partial:
            scores.failures.append(f"label {label} is missing from the {' and the '.join(missing)} labels")
    common = [int(label) for label in wanted if label in present["fixed"] and label in present["moving"]]
    warped = itk.apply(transform, maps["moving"], maps["fixed"], "nearest")
    first, second = _label_tensor(warped), _label_tensor(maps["fixed"])
    scores.dice = dice(first, second, common)
    scores.hd95_mm = {label: hd95(first, second, label, spacing=maps["fixed"].spacing) for label in common}
    scores.figures.update(dice=mean_score(scores.dice), hd95_mm=mean_score(scores.hd95_mm))


def _score_landmarks(scores: Scores, pair: Pair, fixed: Image, moving: Image, transform: WorldMap) -> None:
    given = {"fixed": pair.fixed_landmarks, "moving": pair.moving_landmarks}
    if all(path is None for path in given.values()):
        return
    points = {}
    for (side, path), image in zip(given.items(), (fixed, moving), strict=True):
        if path is None:
            raise ValueError(f"there are landmarks on one side only, not for the {side} image")
        points[side] = pair.read_points(path, image)
    if len(points["fixed"]) != len(points["moving"]):
        counts = f"{len(points['fixed'])} fixed and {len(points['moving'])} moving landmarks"
        raise ValueError(f"there are {counts}; expected as many, in the same order")
    for side, image in (("fixed", fixed), ("moving", moving)):
        index = map_points(invert_matrix(image.affine), points[side])
        outside = ((index < -0.5) | (index > np.array(image.shape) - 0.5)).any(axis=-1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"{int(outside.sum())} {side} landmarks lie outside of the image, the first, number {first + 1}, at "
                f"({', '.join(f'{x:.1f}' for x in points[side][first])}) mm; expected LPS millimetres"
            )
    errors = np.linalg.norm(transform(points["fixed"]) - points["moving"], axis=-1)
    scores.tre_mm = [float(error) for error in errors]
    scores.figures["tre_mm"] = float(errors.mean())


def _score_determinants(scores: Scores, transform: WorldTransform, fixed: Image) -> None:
    determinants = world_determinants(transform, fixed)
    scores.figures["folds_percent"] = 100 * float((determinants < 0).double().mean())
    scores.figures["sd_log_jacobian"] = spread_of_log(determinants)


def world_determinants(transform: itk.PointMap, fixed: Image) -> Tensor:
    """det ∇T at the fixed image's voxels without the outermost ones, (1, *(shape − 2)), in millimetres both ways."""
    if min(fixed.shape) < 3:
        raise ValueError(f"{fixed.name} has {_times(fixed.shape)} voxels; expected at least 3 along every axis")
    inner = itk.jacobian_determinant(transform, fixed).data[(slice(1, -1),) * fixed.dim]
    return torch.from_numpy(np.ascontiguousarray(inner))[None]


def _inconsistency(transform: itk.PointMap, inverse: itk.PointMap, fixed: Image, moving: Image) -> float:
    """Mean |S(T(x)) − x| in mm over a lattice of about 30 points a side, where T(x) lies in the moving image."""
    steps = [max(1, n // 30) for n in fixed.shape]
    index = np.meshgrid(*(np.arange(0, n, s) for n, s in zip(fixed.shape, steps, strict=True)), indexing="ij")
    points = map_points(fixed.affine, np.stack(index, axis=-1).reshape(-1, fixed.dim))
    moved = transform(points)
    there = map_points(invert_matrix(moving.affine), moved)
    inside = ((there >= -0.5) & (there < np.array(moving.shape) - 0.5)).all(axis=-1)
    if not inside.any():
        return math.nan
    return float(np.linalg.norm(inverse(moved[inside]) - points[inside], axis=-1).mean())


def _dense(transform: WorldMap, fixed: Image) -> WorldTransform:
    """Anything but affine maps and one field is evaluated by SimpleITK on the fixed grid, which is quick."""
    if isinstance(transform, WorldTransform):
        return transform
    sitk, like = _sitk(), fixed.to_sitk()
    field = sitk.TransformToDisplacementField(
        transform.transform,
        sitk.sitkVectorFloat64,
        like.GetSize(),
        like.GetOrigin(),
        like.GetSpacing(),
        like.GetDirection(),
    )
    vectors = itk._itk_order(sitk.GetArrayFromImage(field)).astype(np.float32)
    return WorldTransform(np.eye(fixed.dim + 1), np.ascontiguousarray(vectors), fixed.index_to_world())


def _label_tensor(labels: Image) -> Tensor:
    return torch.from_numpy(labels.data.astype(np.int32))[None, None]


# ---- many pairs -----------------------------------------------------------------------------------------------------


@dataclass
class Evaluation:
    """Scores of one or more methods on the same pairs."""

    scores: list[Scores]
    names: Mapping[int, str] = field(default_factory=dict)
    """What the labels are called."""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(scores.method for scores in self.scores))

    @property
    def labels(self) -> list[int]:
        return sorted({label for scores in self.scores for label in scores.dice})

    def of(self, method: str) -> list[Scores]:
        return [scores for scores in self.scores if scores.method == method]

    def means(self, method: str) -> dict[str, float]:
        """The mean over the pairs that have the figure."""
        rows = self.of(method)
        return {key: _mean([scores.figures[key] for scores in rows]) for key in FIGURES}

    def label_name(self, label: int) -> str:
        return self.names.get(label, str(label))

    def dice_of(self, method: str, label: int) -> list[float]:
        return [scores.dice[label] for scores in self.of(method) if not math.isnan(scores.dice.get(label, math.nan))]

    def compare(self, first: str, second: str, figure: str = "dice") -> dict[str, Any]:
        """First minus second on the pairs that both have: mean, 95 % interval, p, and how many pairs the first wins.

        The interval is a bootstrap over pairs; p is a two-sided test that flips the signs of the differences.
        """
        values = [{s.pair: s.figures[figure] for s in self.of(method)} for method in (first, second)]
        common = [pair for pair in values[0] if pair in values[1]]
        differences = np.array([values[0][pair] - values[1][pair] for pair in common])
        differences = differences[np.isfinite(differences)]
        told: dict[str, Any] = {"first": first, "second": second, "figure": figure, "pairs": len(differences)}
        if not len(differences):
            return told
        rng = np.random.default_rng(0)
        drawn = rng.choice(differences, (10_000, len(differences))).mean(axis=1)
        sign = 1 if figure in HIGHER_IS_BETTER else -1
        return told | {
            "mean_difference": float(differences.mean()),
            "interval": [float(x) for x in np.percentile(drawn, [2.5, 97.5])],
            "p": sign_flip_test(differences),
            "won": int((sign * differences > 0).sum()),
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """Every later method against every earlier one, in Dice and in landmark error, where there are any."""
        found = [
            self.compare(second, first, figure)
            for figure in ("dice", "tre_mm")
            for i, first in enumerate(self.methods)
            for second in self.methods[i + 1 :]
        ]
        return [row for row in found if row["pairs"]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "methods": {
                method: {
                    "pairs": len(self.of(method)),
                    "failed": sum(bool(scores.failures) for scores in self.of(method)),
                    **{key: _number(value) for key, value in self.means(method).items()},
                    "dice_per_label": {
                        self.label_name(label): _number(_mean(self.dice_of(method, label))) for label in self.labels
                    },
                }
                for method in self.methods
            },
            "comparisons": self.comparisons(),
            "scores": [scores.as_dict() for scores in self.scores],
        }

    def to_csv(self) -> str:
        """A row for each pair and method, a column for each figure and label."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        kinds = [(kind, label) for kind in ("dice", "hd95_mm") for label in self.labels]
        header = [f"{kind}_{self.label_name(label)}" for kind, label in kinds]
        writer.writerow(["method", "pair", *FIGURES, *header, "failures"])
        for scores in self.scores:
            cells = [scores.figures[key] for key in FIGURES]
            cells += [getattr(scores, kind).get(label, math.nan) for kind, label in kinds]
            written = ["" if math.isnan(value) else f"{value:.6g}" for value in cells]
            writer.writerow([scores.method, scores.pair, *written, "; ".join(scores.failures)])
        return text.getvalue()

    def write(self, folder: PathLike, *, overwrite: bool = False) -> Path:
        """Write `scores.csv`, `scores.json` and, where matplotlib is installed and there are labels, `dice.png`."""
        target = Path(folder)
        taken = [name for name in ("scores.csv", "scores.json", "dice.png") if (target / name).exists()]
        if taken and not overwrite:
            raise FileExistsError(f"{target} already holds {taken[0]}; choose another folder, or --overwrite")
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / "scores.csv", self.to_csv().encode())
        write_atomically(target / "scores.json", (json.dumps(self.as_dict(), indent=2) + "\n").encode())
        if self.labels:
            try:
                picture = self.box_plot()
            except ImportError:
                return target
            write_atomically(target / "dice.png", picture)
        return target

    def box_plot(self) -> bytes:
        """Dice per structure, a box for each method, as the paper's appendix has it: a PNG."""
        from matplotlib.figure import Figure

        count = len(self.methods)
        width = 2 + 0.35 * len(self.labels) * (count + 0.5)
        figure = Figure(figsize=(min(max(width, 7), 14), 4), layout="constrained")
        axes = figure.subplots()
        for number, method in enumerate(self.methods):
            places = [place * (count + 1) + number for place in range(len(self.labels))]
            boxes = axes.boxplot(
                [self.dice_of(method, label) for label in self.labels],
                positions=places,
                widths=0.8,
                patch_artist=True,
                medianprops={"color": "black"},
                flierprops={"markersize": 3},
            )
            for box in boxes["boxes"]:
                box.set_facecolor(f"C{number}")
            axes.plot([], [], "s", color=f"C{number}", label=method)
        middle = [place * (count + 1) + (count - 1) / 2 for place in range(len(self.labels))]
        axes.set_xticks(middle, [self.label_name(label) for label in self.labels], rotation=45, ha="right")
        axes.set(ylabel="Dice", ylim=(0, 1))
        figure.legend(loc="outside upper center", ncols=3)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def evaluate(
    pairs: Sequence[Pair],
    methods: Mapping[str, Method],
    *,
    labels: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    partial: bool = False,
    done: Callable[[Scores], None] = lambda scores: None,
) -> Evaluation:
    """Measure each method on each pair; see `score`. A pair that is listed again fails and is not measured again.

    `done` is called with each pair's scores as they come.

    >>> evaluation = evaluate(read_pairs("pairs.csv"), {"before": identity, "carl": in_folder("results")})
    >>> evaluation.write("figures")
    """
    found = []
    for method_name, method in methods.items():
        for pair, again in _with_repeats(pairs):
            if again:
                scores = Scores(method_name, pair.name, failures=["the pair is listed twice; expected each once"])
            else:
                scores = score(pair, method, name=method_name, labels=labels, partial=partial)
            found.append(scores)
            done(scores)
    return Evaluation(found, names or {})


def _with_repeats(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, bool]]:
    seen = set()
    for pair in pairs:
        key = (_absolute(pair.fixed), _absolute(pair.moving))
        yield pair, key in seen
        seen.add(key)


def sign_flip_test(differences: np.ndarray[Any, Any]) -> float:
    """Two-sided p that the mean is 0: how often random signs give one as far off. Exact for up to 13 differences."""
    count = len(differences)
    if count <= 13:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (20_000, count))
        signs[0] = 1
    means = np.abs((signs * differences).mean(axis=1))
    return float((means >= abs(differences.mean()) - 1e-12).mean())


def adapter(name: str) -> Any:
    """The module of a dataset that has pairs to evaluate on."""
    if name not in DATASETS:
        raise ValueError(f"no dataset {name!r}; expected one of {', '.join(DATASETS)}")
    return importlib.import_module(f"carlreg.datasets.{name}")


DATASETS = ("abdomen1k", "copdgene", "dirlab", "hcp", "learn2reg", "oasis")
"""Of `carlreg.datasets`, those that have `pairs`."""


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _times(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape)
