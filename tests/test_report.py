"""The report: one self-contained file whose script shows the right voxels on the right sides."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, chromium, needs_browser
from PIL import Image as Picture

from carlreg.files import images, world_transform
from carlreg.files.images import Image, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.files.results import InputRecord, Report
from carlreg.files.world_transform import WorldTransform
from carlreg.preparation import foreground
from carlreg.registration import picture as notebook
from carlreg.registration.result import Registration
from carlreg.show import report
from carlreg.show.display import display_grid, high_end
from carlreg.show.report import facts, volumes
from carlreg.show.report.curves import plot_losses
from carlreg.show.report.volumes import (
    LATTICE,
    MAP_VOXELS,
    VISIBLE,
    VOXELS,
    lattice_shape,
    mosaic,
    page_data,
    volume,
    voxel_points,
)
from carlreg.show.thumbnail import SIDE, thumbnail
from carlreg.show.viewer.scene import load_scene

sitk = pytest.importorskip("SimpleITK")
PROGRAM = Path(report.__file__).parent / "page.js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's program")

FLIP = np.array([-1.0, -1.0, 1.0])
CENTRE = np.array([15.0, -12.0, 10.0])  # LPS: to the left, in front, above


def affine(direction: np.ndarray, spacing: tuple[float, ...], shape: tuple[int, ...]) -> np.ndarray:
    """An affine that centres the image at the world's origin."""
    matrix = np.eye(len(shape) + 1)
    matrix[:-1, :-1] = direction * np.array(spacing)
    matrix[:-1, -1] = -matrix[:-1, :-1] @ ((np.array(shape) - 1) / 2)
    return matrix


def ball(shape: tuple[int, ...], matrix: np.ndarray, centre: np.ndarray, radius: float = 9.0) -> Image:
    """Bright about a world point, on a slope that makes every voxel different."""
    index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    world = map_points(matrix, index)
    values = 1000.0 * (np.linalg.norm(world - centre, axis=-1) < radius) + 100 + world @ np.arange(1, len(shape) + 1)
    return Image(values.astype(np.float32), matrix)


def registration(
    move: Any, dim: int = 3, losses: int = 5, warnings: tuple[str, ...] = (), name: str = "fixed.nii.gz"
) -> Registration:
    """Two images whose axes run in odd directions; `move` is the map of world points, on their grids."""
    shape, spacing = ((20, 26, 14), (3.0, 2.0, 5.0)) if dim == 3 else ((40, 30), (2.0, 3.0))
    turned = np.array([[0, 0, -1], [1, 0, 0], [0, -1, 0]]) if dim == 3 else np.eye(2)
    centre = CENTRE[:dim]
    fixed = ball(shape, affine(turned, spacing, shape), centre)
    moving = ball(shape, affine(np.eye(dim), spacing, shape), centre)
    transform = world_transform.sample(move, fixed)
    inverse = world_transform.sample(lambda points: points, moving)
    described = InputRecord(path=f"folder/{name}", shape=list(shape), sha256="0" * 64)
    record = Report(
        model={"name": "carl-base"},
        grid=[96] * dim,
        inputs={"fixed": described, "moving": described},
        metrics={"folds_percent": 0.25, "inverse_consistency_mm": 1.5, "inverse_error_mm": 0.01},
        losses=[{"total": 1.0 / (k + 1), "similarity": 0.5, "regularity": 0.1 * k} for k in range(losses)],
        warnings=warnings,
    )
    return Registration(
        transform, inverse, world_transform.apply(transform, moving, fixed), fixed, moving, record=record
    )


def shift(points: np.ndarray) -> np.ndarray:
    return points + np.array([4.0, -3.0, 6.0])[: points.shape[-1]]


def drawn(path: Path, point: list[float]) -> dict[str, Any]:
    """The results of the page's own functions: panels (height, width, 4) by plane and name, and points."""
    script = Path(__file__).parent / "render_report.js"
    done = subprocess.run(
        ["node", script, PROGRAM, path, json.dumps(point)], capture_output=True, text=True, encoding="utf-8", check=True
    )
    result = json.loads(done.stdout)
    result["panels"] = {
        (p["plane"], p["which"]): np.frombuffer(base64.b64decode(p["rgba"]), np.uint8).reshape(
            p["height"], p["width"], 4
        )
        for p in result["panels"]
    }
    return result


@pytest.mark.parametrize("shape", [(5, 7, 11), (9, 3, 1), (4, 30, 6)])
def test_a_mosaic_holds_every_slice(shape: tuple[int, int, int]) -> None:
    volume = np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8)
    picture, columns = mosaic(volume)
    nx, ny, nz = shape
    for k in range(nz):
        left, top = (k % columns) * nx, (k // columns) * ny
        assert np.array_equal(picture[top : top + ny, left : left + nx].T, volume[:, :, k])


def test_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    path = report.write(
        registration(shift, warnings=("the match is doubtful",)), tmp_path / "report.html", dice={"liver": (0.1, 0.875)}
    )
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert not re.findall(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)
    assert "default-src 'none'" in text
    for words in (
        "the match is doubtful",
        "0.875",
        "0.25 % of the fixed image",
        "1.5 mm on average",
        "<polyline",
        "L",
        "R",
    ):
        assert words in text
    assert "{{" not in text.split("<script", 1)[0]
    with pytest.raises(OSError, match="exists already; choose another name, or give --overwrite"):
        report.write(registration(shift), path)


def test_tables_are_in_words() -> None:
    """Every metric and setting, without names of the program; report.json has those."""
    measured = {"inverse_error_max_mm": 60.3, "dice_before": 0.0, "dice_after": 0.5, "new_metric_mm": 2.0}
    pair = registration(shift)
    record = dataclasses.replace(
        pair.record,
        metrics={**pair.record.metrics, **measured},
        io_iterations=20,
        io_sim="lncc",
        io_sim_reason="the contrasts agree",
        io_kept="the optimisation kept the network's result",
        allow_identity=True,
        grid=(96, 80, 96),
        peak_memory_gb={"process": 1.25},
        orientation={"seems": "as in its header", "applied": False, "likeness": 0.5, "cannot_tell": ["left to right"]},
        look={"degrees": 31.0, "likeness": 0.7, "likeness_upright": 0.4, "turned_back": True},
    )
    metrics = dict(facts.metrics(dataclasses.replace(pair, record=record)))
    assert metrics["error of the written inverse"] == "0.01 mm on average, 60.3 mm at most"
    assert metrics["Dice"] == "0.000 before, 0.500 after"
    assert metrics["new metric mm"] == "2"
    assert dict(facts.settings(record)) == {
        "model": "carl-base",
        "found by a search": "a rotation by 31.0°, likeness 0.7",
        "steps of the optimisation": "20",
        "similarity": "lncc: the contrasts agree",
        "outcome of the optimisation": "the optimisation kept the network's result",
        "may start from the unregistered images": "yes",
        "grid of the network": "96 × 80 × 96",
        "most memory": "1.2 GiB",
        "orientation of the moving scan": "as in its header; whether it is mirrored left to right cannot be told",
    }


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    nasty = "<script>alert(1)<!--{{data}}.nii"
    text = report.page(registration(shift, name=nasty, warnings=("<img src=x>",)), dice={"<b>": (0, 1)})
    assert "&lt;script&gt;alert(1)" in text
    assert "<!--" not in text
    assert "<img" not in text
    assert "<b>" not in text
    assert text.count("<script") == 2


def test_noise_fits() -> None:
    """The largest size of a page's volumes, with incompressible data."""
    rng = np.random.default_rng(0)
    side = round(VOXELS ** (1 / 3))
    picture = len(str(volume(rng.integers(0, 256, (side,) * 3).astype(np.uint8))))
    side = round(MAP_VOXELS ** (1 / 3))
    overlay = len(str(volume(rng.integers(0, 256, (side,) * 3).astype(np.uint8))))
    assert 3 * picture + 2 * overlay + 4 / 3 * 6 * LATTICE < 15e6
    thin = Image(np.zeros((900, 800, 30), np.int16), affine(np.eye(3), (0.5, 0.5, 5.0), (900, 800, 30)))
    assert np.prod(display_grid(thin, VOXELS).shape) <= VOXELS


@needs_node
def test_the_program_shows_the_patients_sides(tmp_path: Path) -> None:
    """A ball on the patient's left, front and top appears there on the screen, for every storage order."""
    pair = registration(lambda points: points)
    point = map_points(to_closest_ras(pair.fixed).world_to_unit(), CENTRE).tolist()
    result = drawn(report.write(pair, tmp_path / "r.html"), point)
    for plane, side in (("axial", "right"), ("coronal", "right"), ("sagittal", "left")):
        for which in ("fixed", "moving", "warped"):
            picture = result["panels"][plane, which][..., 0]
            rows, columns = (picture > 200).nonzero()
            assert len(rows) > 20
            assert (columns.mean() > picture.shape[1] / 2) == (side == "right"), (plane, which)
            assert rows.mean() < picture.shape[0] / 2, (plane, which)


def test_pictures_elsewhere_show_the_same_sides() -> None:
    """Those of notebooks, figures and the gallery: the patient's left is on the right there, too."""
    pair = registration(lambda points: points)  # brighter to the left, to the back and upwards
    for axis, lower in ((2, True), (1, False), (0, False)):
        for picture in notebook.slices(pair, axis)[:3]:
            across, down = (np.polyfit(np.arange(n), picture.mean(a), 1)[0] for a, n in enumerate(picture.shape[::-1]))
            assert across > 0, axis
            assert (down > 0) == lower, axis
    blend = np.asarray(Picture.open(io.BytesIO(thumbnail(pair))))[:, -SIDE:]
    rows, columns = (blend.min(axis=-1) > 200).nonzero()
    assert len(rows) > 10
    assert columns.mean() > SIDE / 2
    assert rows.mean() < SIDE / 2


@needs_node
def test_the_program_shows_the_voxels_and_the_map(tmp_path: Path) -> None:
    pair = registration(shift)
    result = drawn(report.write(pair, tmp_path / "r.html", spread=pair.fixed), [0.4, 0.5, 0.6])
    # The axial picture against one made by hand.
    turned = to_closest_ras(pair.fixed)
    shape = display_grid(turned, VOXELS).shape
    picture = result["panels"]["axial", "fixed"][..., 0]
    assert picture.shape == (shape[1], shape[0])
    level = round(result["point"][2] * (shape[2] - 1))
    points = voxel_points(display_grid(turned, VOXELS))[::-1, ::-1, level].swapaxes(0, 1)
    index = map_points(np.linalg.inv(turned.affine), points)
    nearest = turned.data[tuple(np.rint(index).astype(int).reshape(-1, 3).T)].reshape(picture.shape)
    assert np.corrcoef(nearest.ravel(), picture.ravel().astype(float))[0, 1] > 0.9
    # The point that it says is the transform's, in RAS.
    flip = np.array([-1, -1, 1])
    expected = pair.transform(np.array(result["fixedWorld"]) * flip) * flip
    assert np.abs(np.array(result["movingWorld"]) - expected).max() < 0.1
    assert np.allclose(result["clicked"], result["point"])
    assert result["inverted"]["error"] < 0.02
    assert np.abs(np.array(result["inverted"]["point"]) - result["point"]).max() < 1e-3
    for name in ("moving", "warped", "blend", "edges", "checkerboard", "difference", "grid", "jacobian", "certainty"):
        assert result["panels"]["coronal", name].std() > 0, name
    # The blend: fixed in green, warped in magenta, so grey where they agree.
    blend, ours, theirs = (result["panels"]["axial", name].astype(int) for name in ("blend", "fixed", "warped"))
    inside = (theirs[..., 0] == theirs[..., 2]) & (blend[..., 1] > 0)
    assert np.abs(blend[..., 1] - ours[..., 1])[inside].max() <= 1
    assert np.abs(blend[..., 0] - theirs[..., 0])[inside].max() <= 1
    # A shift changes no volume: the map of it is white times the picture, and magenta nowhere.
    jacobian = result["panels"]["axial", "jacobian"].astype(int)
    assert np.abs(jacobian[..., 0] - jacobian[..., 2]).max() <= 3


def rough(shape: tuple[int, int, int]) -> Registration:
    """A map that is different at every voxel of the fixed image."""
    pair = registration(shift)
    fixed = ball(shape, affine(np.eye(3), (1.0, 1.0, 3.0), shape), CENTRE)
    noise = np.random.default_rng(0).normal(0, 2, (*shape, 3)).astype(np.float32)
    transform = WorldTransform(np.eye(4), noise, fixed.affine)
    warped = world_transform.apply(transform, pair.moving, fixed)
    return dataclasses.replace(pair, fixed=fixed, transform=transform, warped=warped)


@needs_node
def test_the_program_knows_the_map_of_a_usual_scan(tmp_path: Path) -> None:
    """To less than it shows, even if the map bends between any two voxels."""
    pair = rough((90, 70, 12))
    path = report.write(pair, tmp_path / "r.html")
    assert page_data(pair, None, {})["map"]["off"] == 0
    for point in ([0.313, 0.611, 0.52], [0.702, 0.34, 0.77]):
        result = drawn(path, point)
        expected = pair.transform(np.array(result["fixedWorld"]) * FLIP) * FLIP
        assert np.abs(np.array(result["movingWorld"]) - expected).max() < VISIBLE


def test_the_lattice_is_that_of_the_voxels_or_even() -> None:
    def shape(*voxels: int, spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> tuple[int, ...]:
        return lattice_shape(Image(np.zeros(voxels, np.uint8), affine(np.eye(len(voxels)), spacing, voxels)))

    assert shape(77, 103, 85) == (77, 103, 85)
    assert shape(150, 150, 20, spacing=(0.7, 0.7, 5.0)) == (150, 150, 20)
    coarse = shape(512, 512, 60, spacing=(0.7, 0.7, 5.0))
    assert 0.9 * LATTICE < np.prod(coarse) <= LATTICE
    assert coarse[0] == coarse[1] < 512
    assert coarse[2] == 60  # still finer than the others


@pytest.mark.browser
@needs_browser
def test_the_page_says_how_well_it_knows_the_map(tab: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = registration(bend)
    for most, ending in ((LATTICE, r"\.[0-9] mm$"), (60, r"\.[0-9] ± [0-9]\.?[0-9]? mm$")):
        monkeypatch.setattr(volumes, "LATTICE", most)
        show(tab, report.write(pair, tmp_path / f"{most}.html"))
        words = tab.get("document.getElementById('where').textContent")
        assert re.search(ending, words), words
        assert bool(tab.get("document.getElementById('where').title")) == ("±" in words) == (most == 60)
    # What it promises holds at all but 1 % of the anatomy.
    off = float(words.split("± ")[1].split(" ")[0])
    unit = np.random.default_rng(1).uniform(0, 1, (3000, 3))
    found = np.array(tab.get(f"{unit.tolist()}.map((u) => world(data.moving, transform(data, u)))")) * FLIP
    exact = pair.transform(map_points(to_closest_ras(pair.fixed).unit_to_world(), unit))
    assert 0.97 < (np.linalg.norm(found - exact, axis=-1) < off).mean() < 1


@needs_node
def test_the_program_marks_folds(tmp_path: Path) -> None:
    def fold(points: np.ndarray) -> np.ndarray:
        return points - np.array([1.0, 0, 0]) * 18 * np.tanh(points[..., :1] / 6)

    result = drawn(report.write(registration(fold), tmp_path / "r.html"), [0.5, 0.5, 0.5])
    panel = result["panels"]["axial", "jacobian"].astype(int)
    magenta = (panel[..., 0] == 255) & (panel[..., 1] == 0) & (panel[..., 2] == 220)
    assert 0.05 < magenta.mean() < 0.5


@needs_node
def test_the_grid_is_that_of_the_moving_image(tmp_path: Path) -> None:
    """A shift keeps its lines straight and equally far apart; every line of a bent grid lies on a whole multiple."""
    result = drawn(report.write(registration(shift), tmp_path / "r.html"), [0.5, 0.5, 0.5])
    segments = np.array(result["grid"][0])
    steps = np.abs(segments[:, :2] - segments[:, 2:])
    assert steps.min(axis=1).max() < 1e-3  # along one of the axes
    for axis in (0, 1):
        places = np.unique(segments[steps[:, axis] < 1e-3, axis].round(2))
        assert len(places) >= 8
        assert np.diff(places).max() - np.diff(places).min() < 0.05
    pair = registration(bend)
    result = drawn(report.write(pair, tmp_path / "bent.html"), [0.5, 0.5, 0.5])
    segments = np.array(result["grid"][0])
    turned = to_closest_ras(pair.fixed)
    shape = display_grid(turned, VOXELS).shape
    unit = np.concatenate(
        [1 - (segments[:, :2] - 0.5) / (np.array(shape[:2]) - 1), np.full((len(segments), 1), 0.5)], 1
    )
    moved = map_points(
        to_closest_ras(pair.moving).world_to_unit(), pair.transform(map_points(turned.unit_to_world(), unit))
    )
    sides = [n * s for n, s in zip(display_grid(to_closest_ras(pair.moving), VOXELS).shape, (2.0, 2.0), strict=False)]
    lines = [round(16 * side / max(sides)) for side in sides]
    off = np.min([np.abs(moved[:, a] * lines[a] - np.rint(moved[:, a] * lines[a])) for a in (0, 1)], axis=0)
    assert off.max() < 0.15


@needs_node
def test_outlines_are_the_borders_of_labels(tmp_path: Path) -> None:
    """As long as the borders between unequal neighbours, counted voxel by voxel."""
    rng = np.random.default_rng(0)
    pair = registration(shift)
    data = rng.integers(0, 4, pair.fixed.shape).astype(np.uint8) * 50
    labels = Image(data, pair.fixed.affine)
    pair = dataclasses.replace(pair, fixed_labels=labels)
    result = drawn(report.write(pair, tmp_path / "r.html"), [0.5, 0.5, 0.5])
    found = dict(result["outlines"])
    total = sum(abs(x1 - x0) + abs(y1 - y0) for lines in found.values() for x0, y0, x1, y1 in lines)
    turned = to_closest_ras(labels)
    shape = display_grid(turned, VOXELS).shape
    near = np.ix_(*(np.rint(np.linspace(0, n - 1, m)).astype(int) for n, m in zip(turned.shape, shape, strict=True)))
    level = int(np.floor(0.5 * (shape[2] - 1) + 0.5))
    picture = np.pad(turned.data[near][:, :, level], 1)
    assert set(found) == {1, 2, 3}
    assert total == (np.diff(picture, axis=0) != 0).sum() + (np.diff(picture, axis=1) != 0).sum()


@pytest.mark.parametrize(
    "values", [[1.0, 0.1, 0.01, 0.001], [0.5, 0.49, 0.48, 0.47], [0.2, 0.0, -0.1, -0.15], [0.0] * 4]
)
def test_the_loss_is_drawn_on_a_logarithmic_axis(values: list[float]) -> None:
    plot = plot_losses([{"total": value, "level": n // 2} for n, value in enumerate(values)])
    assert plot is not None
    points = np.array([[float(c) for c in point.split(",")] for point in plot.curves["total"].split()])
    assert list(plot.curves) == ["total"]
    assert (np.diff(points[:, 0]) > 0).all()
    assert np.array_equal(np.sign(np.diff(points[:, 1])), -np.sign(np.diff(values)))  # downwards on the screen
    assert plot.levels == [(points[1, 0] + points[2, 0]) / 2]
    assert [text for _, text in plot.steps] == ["1", "2", "3", "4"]
    heights = [y for y, _ in plot.rows]
    assert len(heights) >= 2 or len(set(values)) == 1
    assert all(8 <= y <= 192 for y in heights)
    assert heights == sorted(heights, reverse=True)
    if values[0] == 1.0:  # powers of ten are equally far apart
        assert np.ptp(np.diff(points[:, 1])) < 0.2
    assert plot_losses([{"total": 1.0}]) is None
    assert plot_losses([{"total": 1.0}, {"total": float("nan")}]) is None


@needs_node
def test_two_dimensions(tmp_path: Path) -> None:
    pair = registration(shift, dim=2)
    result = drawn(report.write(pair, tmp_path / "r.html"), [0.4, 0.5, 0.0])
    picture = result["panels"]["image", "fixed"]
    assert {plane for plane, _ in result["panels"]} == {"image"}
    assert picture.shape[1] / picture.shape[0] == pytest.approx(80 / 90, rel=0.1)  # millimetres, not voxels
    row, column = np.unravel_index(picture[..., 0].argmax(), picture.shape[:2])
    assert column > picture.shape[1] / 2  # x to the right
    assert row < picture.shape[0] / 2  # y downwards: the ball is at −12
    expected = pair.transform(np.array(result["fixedWorld"][:2]))
    assert np.abs(np.array(result["movingWorld"][:2]) - expected).max() < 0.1


# ---- in a browser ---------------------------------------------------------------------------------------------------


def pixels(page: Page, canvas: int) -> str:
    """The canvas's content as text."""
    return page.get(f"document.querySelectorAll('.plane canvas')[{canvas}].toDataURL()")


def bend(points: np.ndarray) -> np.ndarray:
    return points + 5 * np.sin(points[..., ::-1] / 25) + np.array([4.0, -3.0, 6.0])


class Screen:
    """Where voxels should be on the screen: both images at the same scale, as large as all panels allow."""

    def __init__(self, page: Page, pair: Registration) -> None:
        self.page = page
        self.images = {side: to_closest_ras(getattr(pair, side)) for side in ("fixed", "moving")}
        self.grids = {side: display_grid(image, VOXELS) for side, image in self.images.items()}
        boxes = page.get(
            "Array.from(document.querySelectorAll('.plane figure'), (f) => { const b = f.getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })"
        )
        self.boxes = np.array(boxes).reshape(3, 3, 4)  # plane, image, box

    def position(self, side: str, plane: int, index: tuple[int, int]) -> tuple[float, float]:
        """The position of column and row of the picture of a plane."""
        axes = [(0, 1), (0, 2), (1, 2)]
        sizes = {name: np.array(grid.shape) * grid.spacing for name, grid in self.grids.items()}
        most = np.maximum(sizes["fixed"], sizes["moving"])
        scale = min(self.boxes[p, 0, 2 + n] / most[axes[p][n]] for p in range(3) for n in (0, 1))
        left, top, width, height = self.boxes[plane, 0 if side == "fixed" else 2]
        pixel = scale * np.array(self.grids[side].spacing)[list(axes[plane])]
        corner = (np.array([width, height]) - scale * sizes[side][list(axes[plane])]) / 2
        return tuple(np.array([left, top]) + corner + (np.array(index) + 0.5) * pixel)


def shown_points(page: Page) -> np.ndarray:
    """The fixed and the moving point (2, 3) that the page shows, LPS."""
    words = page.get("document.getElementById('where').textContent")
    return np.array([float(n) for n in re.findall(r"-?[0-9]+\.[0-9]", words)]).reshape(2, 3) * FLIP


def slices(page: Page) -> list[int]:
    return page.get("Array.from(document.querySelectorAll('.plane input'), (one) => Number(one.value))")


def show(page: Page, path: Path, **size: int) -> None:
    page.open(path.as_uri(), **{"width": 1400, "height": 900} | size)
    page.wait("document.body.dataset.ready")
    page.settle()


def expected_error(fixed: Image) -> Image:
    """A map that grows with the distance from the centre of the world, on a coarser grid."""
    grid = display_grid(to_closest_ras(fixed), 500)
    return dataclasses.replace(grid, data=np.linalg.norm(voxel_points(grid), axis=-1).astype(np.float32) / 10)


def read_volume(found: dict[str, Any]) -> np.ndarray:
    """The levels (nx, ny, nz) of a volume in the page, from its mosaic."""
    picture = np.asarray(Picture.open(io.BytesIO(base64.b64decode(found["png"].split(",")[1]))))
    (nx, ny, nz), columns = found["shape"], found["columns"]
    corners = [((k % columns) * nx, (k // columns) * ny) for k in range(nz)]
    return np.stack([picture[top : top + ny, left : left + nx].T for left, top in corners], axis=-1).astype(float)


def test_the_page_has_the_expected_error() -> None:
    pair = registration(bend)
    assert "error" not in page_data(pair, None, {})
    errors = expected_error(pair.fixed)
    found = page_data(dataclasses.replace(pair, expected_error=errors), None, {})["error"]
    inside = np.argwhere(foreground(pair.fixed))
    high = np.percentile(np.linalg.norm(map_points(pair.fixed.affine, inside), axis=-1) / 10, 99)
    assert 0.98 * high < found["high"] < 1.1 * high  # interpolated between coarse voxels; rounded up
    levels = read_volume(found)
    points = voxel_points(display_grid(to_closest_ras(pair.fixed), MAP_VOXELS))
    truth = np.linalg.norm(points, axis=-1) / 10
    inner = truth < 0.9 * found["high"]
    assert np.abs(levels / 255 * found["high"] - truth)[inner].max() < 0.5  # interpolated between coarse voxels
    assert np.corrcoef(levels[inner], truth[inner])[0, 1] > 0.99


def test_the_anatomy_scales_the_expected_error(tmp_path: Path) -> None:
    """Far outside the head the map is meaningless and high; report and viewer end their colours alike."""
    pair = registration(shift)
    data = np.zeros(pair.fixed.shape, np.float32)
    data[6:14, 8:18, 4:10] = np.random.default_rng(0).uniform(100, 200, (8, 10, 6))
    grid = display_grid(to_closest_ras(pair.fixed), 4000)
    index = map_points(np.linalg.inv(pair.fixed.affine), voxel_points(grid))
    near = ((index > (2, 4, 1)) & (index < (17, 22, 13))).all(axis=-1)  # with a rim of some voxels
    errors = dataclasses.replace(grid, data=np.where(near, 2 + index[..., 0] / 10, 46.0).astype(np.float32))
    pair = dataclasses.replace(pair, fixed=Image(data, pair.fixed.affine), expected_error=errors)
    high = page_data(pair, None, {})["error"]["high"]
    assert 3.2 <= high <= 3.5
    images.write(pair.fixed, tmp_path / "fixed.nii.gz")
    record = dataclasses.replace(pair.record, inputs={"fixed": InputRecord(path=str(tmp_path / "fixed.nii.gz"))})
    out = dataclasses.replace(pair, record=record).save(tmp_path / "out")
    assert load_scene(out, trust=True).describe()["volumes"]["expected_error"]["window"] == [0, high]


@pytest.mark.parametrize(
    ("value", "end"), [(3.41, 3.5), (0.081, 0.081), (0.0811, 0.082), (46.2, 47.0), (99.5, 100.0), (123.0, 130.0)]
)
def test_the_end_of_the_scale_is_rounded_up(value: float, end: float) -> None:
    """So that the legend can name it in two digits and be right."""
    fixed = registration(shift).fixed
    errors = Image(np.full(fixed.shape, value), fixed.affine)
    assert high_end(errors, fixed) == end
    assert high_end(errors, Image(np.zeros(fixed.shape), fixed.affine)) == end


@pytest.fixture(scope="module")
def bent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Registration]:
    pair = registration(bend, losses=204, warnings=("the match is doubtful",))
    pair = dataclasses.replace(pair, expected_error=expected_error(pair.fixed))
    path = tmp_path_factory.mktemp("report") / "report.html"
    dice = {"liver": (0.1, 0.875), "left and right portal and splenic veins": (0.012, 0.386)}
    return report.write(pair, path, spread=pair.fixed, dice=dice), pair


@pytest.mark.browser
@needs_browser
def test_the_page_in_a_browser(tab: Page, bent: tuple[Path, Registration]) -> None:
    """Three planes on one screen; a click selects the voxel under it; there are no requests and no errors."""
    path, pair = bent
    show(tab, path)
    screen = Screen(tab, pair)
    assert tab.get("document.querySelectorAll('.plane canvas').length") == 9
    assert (screen.boxes[..., 1] + screen.boxes[..., 3]).max() <= 900
    assert tab.get("document.getElementById('sides').getBoundingClientRect().bottom") <= 900
    assert len({pixels(tab, canvas) for canvas in range(3)}) == 3

    # Radiological, front at the top: column c of the axial picture is nx − 1 − c along the array, row r the like.
    (nx, ny, _), (column, row) = screen.grids["fixed"].shape, (20, 13)
    tab.click(*screen.position("fixed", 0, (column, row)))
    tab.settle()
    here, there = shown_points(tab)
    expected = map_points(screen.grids["fixed"].unit_to_world(), [1 - column / (nx - 1), 1 - row / (ny - 1), 0.5])
    assert np.abs(here - expected).max() < 0.4  # the mouse knows whole pixels; a voxel is 2 mm
    assert np.abs(there - pair.transform(here)).max() < 0.2  # two roundings

    before = tab.get("document.getElementById('where').textContent")
    tab.get("document.getElementById('frame').click()")
    tab.settle()
    assert tab.get("document.getElementById('frame').textContent") == "LPS"
    numbers = [
        re.findall(r"-?[0-9]+\.[0-9]", text)
        for text in (before, tab.get("document.getElementById('where').textContent"))
    ]
    ras, lps = (np.array(words, float).reshape(2, 3) for words in numbers)
    assert np.array_equal(ras * FLIP, lps)

    views = tab.get("Array.from(document.getElementById('view').options, (o) => o.value)")
    pictures = set()
    for view in views:
        tab.choose("#view", view)
        if view == "flicker":
            tab.wait("document.querySelectorAll('figcaption')[1].textContent === 'flicker: fixed'")
        tab.settle()
        pictures.add(pixels(tab, 1))
        if view == "error":
            assert re.search(
                r"expected error 0 mm .* ≥ [0-9.]+ mm$", tab.get("document.getElementById('legend').innerHTML")
            )
    assert len(pictures) == len(views) == 10
    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
    assert tab.complaints == []

    show(tab, path, width=390, height=844)
    assert tab.get("document.documentElement.scrollWidth") == 390  # nothing sticks out on a phone
    assert tab.get("Array.from(document.querySelectorAll('figure')).every((f) => f.clientHeight > 60)")
    # Numbers of a table stay on one line, and none of the axis is cut.
    lines = (
        "(one) => { const r = document.createRange(); r.selectNodeContents(one); return r.getClientRects().length; }"
    )
    assert set(tab.get(f"Array.from(document.querySelectorAll('.sorted td'), {lines})")) == {1}
    box = "(one) => one.getBoundingClientRect().right"
    (edge,) = tab.get(f"Array.from(document.querySelectorAll('#facts svg'), {box})")
    assert max(tab.get(f"Array.from(document.querySelectorAll('#facts svg text'), {box})")) <= edge


@pytest.mark.browser
@needs_browser
def test_a_click_in_the_moving_image(tab: Page, bent: tuple[Path, Registration]) -> None:
    path, pair = bent
    show(tab, path)
    screen = Screen(tab, pair)
    (nx, ny, _), (column, row) = screen.grids["moving"].shape, (12, 18)
    _, before = shown_points(tab)
    tab.click(*screen.position("moving", 0, (column, row)))
    tab.settle()
    here, there = shown_points(tab)
    expected = map_points(screen.grids["moving"].unit_to_world(), [1 - column / (nx - 1), 1 - row / (ny - 1), 0.5])
    assert np.abs(there - expected)[:2].max() < 0.4
    assert abs(there[2] - before[2]) < 0.2  # in the plane that is shown
    assert np.abs(there - pair.transform(here)).max() < 0.2


@pytest.mark.browser
@needs_browser
def test_wheel_keys_drag_and_zoom(tab: Page, bent: tuple[Path, Registration]) -> None:
    path, pair = bent
    show(tab, path)
    screen, start = Screen(tab, pair), slices(tab)
    x, y = screen.position("fixed", 1, (20, 13))
    for turns, down in ((3, -100), (1, 100)):
        for _ in range(turns):
            tab.wheel(x, y, down)
            tab.settle()
    assert slices(tab) == [start[0], start[1] + 2, start[2]]  # of the plane under the mouse
    tab.key("ArrowDown")
    tab.key("ArrowDown")
    tab.key("ArrowRight")
    tab.settle()
    assert slices(tab) == [start[0], start[1] + 1, start[2]]
    assert tab.get("scrollY") == 0

    plain, window = pixels(tab, 3), tab.get("document.getElementById('window').value")
    point = shown_points(tab)
    tab.drag(x, y, 60, 40)
    tab.settle()
    assert pixels(tab, 3) != plain
    assert "width" in tab.get("document.getElementById('window').selectedOptions[0].textContent")
    assert np.array_equal(shown_points(tab), point)  # a drag is not a click
    tab.key("Escape")
    tab.settle()
    assert tab.get("document.getElementById('window').value") == window
    assert pixels(tab, 3) == plain

    x, y = screen.position("fixed", 1, (15, 20))
    tab.click(x, y, count=2)
    tab.settle()
    point = shown_points(tab)[0]
    # Three times as large about the point that was clicked: 30 pixels are 10 of before.
    left, top, width, height = screen.boxes[1, 0]
    voxel = screen.position("fixed", 1, (1, 0))[0] - screen.position("fixed", 1, (0, 0))[0]
    tab.click(left + width / 2, top + height / 2)
    tab.settle()
    middle = shown_points(tab)[0]
    assert np.abs(middle - point).max() < 1.5
    tab.click(left + width / 2 + 30, top + height / 2)
    tab.settle()
    moved = np.abs(shown_points(tab)[0] - middle)
    assert moved.max() == pytest.approx(10 * screen.grids["fixed"].spacing[0] / voxel, abs=0.5)
    tab.click(left + width / 2, top + height / 2, count=2)
    tab.settle()
    tab.click(*screen.position("fixed", 1, (15, 20)))
    tab.settle()
    assert np.abs(shown_points(tab)[0] - point).max() < 0.4
    assert tab.complaints == []


def structures(count: int = 138) -> Registration:
    """A registration with so many labels, numbered with a gap, in a block amid background."""
    pair = registration(shift)
    numbers = np.append(np.arange(1, count), 300)

    def labels(image: Image) -> Image:
        data = np.zeros(image.shape, np.uint16)
        inner = tuple(slice(n // 4, n - n // 4) for n in image.shape)
        block = data[inner]
        data[inner] = numbers[(np.arange(block.size) * count // block.size).reshape(block.shape)]
        return Image(data, image.affine)

    scores = {int(n): float(0.3 + 0.5 * np.sin(k) ** 2) for k, n in enumerate(numbers)}
    record = dataclasses.replace(
        pair.record,
        dice={"before": {n: score / 2 for n, score in scores.items()}, "after": scores},
        label_names={int(n): f"structure {n}" for n in numbers},
    )
    maps = {"labels": labels(pair.fixed), "fixed_labels": labels(pair.fixed), "moving_labels": labels(pair.moving)}
    return dataclasses.replace(pair, record=record, **maps)


@pytest.mark.browser
@needs_browser
def test_labels_of_138_structures(tab: Page, tmp_path: Path) -> None:
    pair = structures()
    show(tab, report.write(pair, tmp_path / "report.html"))
    assert tab.get("document.querySelector('#labels').open") is False  # folded
    assert "138 structures" in tab.get("document.querySelector('#labels summary').textContent")
    tab.get("document.querySelector('#labels summary').click()")
    assert tab.get("document.querySelectorAll('#labels tbody tr').length") == 138
    after = "Array.from(document.querySelectorAll('#labels tbody tr'), (row) => Number(row.cells[2].dataset.value))"
    for order in (sorted(tab.get(after), reverse=True), sorted(tab.get(after))):
        tab.get("document.querySelectorAll('#labels th button')[2].click()")
        assert tab.get(after) == order

    assert tab.complaints == []

    # Outlines are coloured, and stay inside the block: the background remains grey.
    screen = Screen(tab, pair)
    colours = "(() => { const c = document.querySelector('.plane canvas').getContext('2d');"
    colours += " const d = c.getImageData(X, Y, W, H).data; let n = 0;"
    colours += " for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - d[i + 1]) > 40; return n; })()"

    def coloured(first: tuple[int, int], last: tuple[int, int]) -> int:
        (x0, y0), (x1, y1) = (screen.position("fixed", 0, corner) for corner in (first, last))
        left, top = screen.boxes[0, 0, :2]
        numbers = {"X": round(x0 - left), "Y": round(y0 - top), "W": round(x1 - x0), "H": round(y1 - y0)}
        return tab.get(re.sub(r"\b[XYWH]\b", lambda m: str(numbers[m[0]]), colours))

    nx, ny, _ = screen.grids["fixed"].shape
    assert coloured((nx // 3, ny // 3), (nx // 2 - 1, ny // 2 - 1)) > 50
    assert coloured((1, 1), (nx // 5, ny // 5)) == 0
    tab.get("document.getElementById('contours').click()")
    tab.settle()
    assert coloured((nx // 3, ny // 3), (nx // 2 - 1, ny // 2 - 1)) == 0
    tab.get("document.getElementById('contours').click()")

    # A row leads to its structure, whose name is shown; so does the mouse.
    row = "document.querySelector('#labels tr[data-label=\"100\"]')"
    assert tab.get(f"getComputedStyle({row}.querySelector('.swatch')).backgroundColor") != "rgba(0, 0, 0, 0)"
    tab.get(f"{row}.click()")
    tab.settle()
    assert "fixed: structure 100" in tab.get("document.getElementById('structure').textContent")
    index = map_points(np.linalg.inv(pair.fixed.affine), shown_points(tab)[0])
    assert pair.fixed_labels.data[tuple(np.rint(index).astype(int))] == 100


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [1400, 1000])
def test_the_images_stay_where_they_are(tab: Page, tmp_path: Path, width: int) -> None:
    """Explanations of views and names of structures come and go, and must not move what they are about."""
    pair = structures()
    show(tab, report.write(pair, tmp_path / "report.html"), width=width, height=900)
    box = "(one) => Object.values(one.getBoundingClientRect().toJSON())"
    boxes = f"Array.from(document.querySelectorAll('.plane canvas'), {box})"
    first = tab.get(boxes)
    seen = set()
    for view in tab.get("Array.from(document.getElementById('view').options, (o) => o.value)"):
        tab.choose("#view", view)
        for u in (0.02, 0.5):  # without a structure and in one
            tab.get(f"(state.point = [{u}, {u}, {u}], document.getElementById('frame').click())")
            tab.settle()
            seen.add(tab.get("document.getElementById('structure').textContent") == "")
            assert tab.get(boxes) == first
    assert seen == {True, False}
    assert tab.get("document.documentElement.scrollWidth") == width


@pytest.mark.browser
@needs_browser
def test_a_complaint_is_noticed(tmp_path: Path) -> None:
    """The test above relies on this: errors and requests are recorded."""
    path = tmp_path / "bad.html"
    path.write_text("<script>fetch('http://127.0.0.1:9/').catch(() => 0); nothing();</script>", encoding="utf-8")
    with chromium() as page:
        page.open(path.as_uri())
        page.wait("document.readyState === 'complete'")
        page.settle()
        assert any("nothing is not defined" in words for words in page.complaints)
        assert "http://127.0.0.1:9/" in page.requests
