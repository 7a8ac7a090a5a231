"""The report: one self-contained file whose script shows the right voxels on the right sides."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, chromium, needs_browser

from carlreg.files import world_transform
from carlreg.files.images import Image, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.files.results import InputRecord, Report
from carlreg.registration.result import Registration
from carlreg.show import report
from carlreg.show.display import display_grid
from carlreg.show.report.volumes import LATTICE, MAP_VOXELS, VOXELS, mosaic, volume, voxel_points

sitk = pytest.importorskip("SimpleITK")
PROGRAM = Path(report.__file__).parent / "page.js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's program")

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
    with pytest.raises(OSError, match="exists already; choose another name, or overwrite=True"):
        report.write(registration(shift), path)


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
    assert 3 * picture + 2 * overlay + 4 / 3 * 6 * LATTICE**3 < 7.5e6
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
    for name in ("moving", "warped", "blend", "checkerboard", "difference", "grid", "jacobian", "certainty"):
        assert result["panels"]["coronal", name].std() > 0, name
    # A shift changes no volume: the map of it is white times the picture, and magenta nowhere.
    jacobian = result["panels"]["axial", "jacobian"].astype(int)
    assert np.abs(jacobian[..., 0] - jacobian[..., 2]).max() <= 3


@needs_node
def test_the_program_marks_folds(tmp_path: Path) -> None:
    def fold(points: np.ndarray) -> np.ndarray:
        return points - np.array([1.0, 0, 0]) * 18 * np.tanh(points[..., :1] / 6)

    result = drawn(report.write(registration(fold), tmp_path / "r.html"), [0.5, 0.5, 0.5])
    panel = result["panels"]["axial", "jacobian"].astype(int)
    magenta = (panel[..., 0] == 255) & (panel[..., 1] == 0) & (panel[..., 2] == 220)
    assert 0.05 < magenta.mean() < 0.5


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


@pytest.mark.browser
@needs_browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """The slider moves the slice, a click selects the voxel under it, and there are no requests and no errors."""
    pair = registration(bend, warnings=("the match is doubtful",))
    path = report.write(pair, tmp_path / "report.html", spread=pair.fixed, dice={"liver": (0.1, 0.875)})
    turned = to_closest_ras(pair.fixed)
    nx, ny, nz = display_grid(turned, VOXELS).shape
    with chromium() as page:
        page.open(path.as_uri())
        page.wait("document.body.dataset.ready")
        page.settle()
        assert page.get("document.querySelectorAll('.plane canvas').length") == 9

        before = [pixels(page, canvas) for canvas in range(3)]
        assert len(set(before)) == 3
        page.get("document.querySelector('.plane input').focus()")
        for _ in range(4):
            page.key("ArrowRight")
        page.settle()
        level = nz // 2 + 4  # half of nz − 1, rounded up
        assert page.get("Number(document.querySelector('.plane input').value)") == level
        assert all(pixels(page, canvas) != old for canvas, old in enumerate(before))

        # Radiological, front at the top: column c of the axial picture is nx − 1 − c along the array, row r the like.
        column, row = nx // 3, ny // 4
        left, top, width, tall = page.box(".plane canvas")
        page.click(left + (column + 0.5) * width / nx, top + (row + 0.5) * tall / ny)
        page.settle()
        words = page.get("document.getElementById('where').textContent")
        shown = np.array([float(n) for n in re.findall(r"-?[0-9]+\.[0-9]", words)]).reshape(2, 3)
        unit = [1 - column / (nx - 1), 1 - row / (ny - 1), level / (nz - 1)]
        flip = np.array([-1, -1, 1])
        here = map_points(turned.unit_to_world(), unit)
        assert np.abs(shown[0] - here * flip).max() < 0.3  # the mouse knows whole pixels; a voxel is 2 mm
        assert np.abs(shown[1] - pair.transform(shown[0] * flip) * flip).max() < 0.2  # two roundings

        views = page.get("Array.from(document.getElementById('view').options, (o) => o.value)")
        pictures = set()
        for view in views:
            page.get(f"((s) => {{ s.value = '{view}'; s.onchange({{target: s}}); }})(document.getElementById('view'))")
            page.settle()
            pictures.add(pixels(page, 1))
        assert len(pictures) == len(views) == 7
        assert [url for url in page.requests if not url.startswith("data:")] == [path.as_uri()]
        assert page.complaints == []

        page.open(path.as_uri(), width=390, height=844, dark=True)
        page.wait("document.body.dataset.ready")
        assert page.get("document.documentElement.scrollWidth") == 390  # nothing sticks out on a phone
        assert page.get("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


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
