"""Landmark files: what 3D Slicer and ANTs write is read, and everything but the positions is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from carlreg.files.landmarks import PointsError, read_points, write_points

FCSV = """# Markups fiducial file version = 5.0
# CoordinateSystem = {0}
# columns = id,x,y,z,ow,ox,oy,oz,vis,sel,lock,label,desc,associatedNodeID
1,{1},{2},30.5,0,0,0,1,1,1,0,F-1,"a, b",
2,{3},{4},-1,0,0,0,1,1,1,0,F-2,,
"""
EXPECTED = np.array([[10.0, -20.0, 30.5], [1.0, 2.0, -1.0]])  # LPS
SHIFT = np.array([1.0, 0.0, 0.0])


def markups(space: str) -> dict[str, object]:
    sign = -1 if space == "RAS" else 1
    points = [
        {"id": str(n), "label": f"F-{n}", "position": [sign * p[0], sign * p[1], p[2]]}
        for n, p in enumerate(EXPECTED.tolist())
    ]
    return {
        "@schema": "https://example.org/markups",
        "markups": [
            {"type": "Fiducial", "coordinateSystem": space, "controlPoints": points, "display": {"opacity": 1}}
        ],
    }


@pytest.mark.parametrize("system", ["LPS", "1", "RAS", "0"])
def test_slicers_lists_say_their_space(tmp_path: Path, system: str) -> None:
    sign = -1 if system in ("RAS", "0") else 1
    numbers = [sign * 10, sign * -20, sign * 1, sign * 2]
    (tmp_path / "a.fcsv").write_text(FCSV.format(system, *numbers))
    points = read_points(tmp_path / "a.fcsv")
    assert np.array_equal(points.positions, EXPECTED)
    write_points(points, points.positions + SHIFT, tmp_path / "b.fcsv")
    text = (tmp_path / "b.fcsv").read_text(encoding="utf-8")
    assert f"# CoordinateSystem = {system}" in text
    assert 'F-1,"a, b",' in text
    assert np.allclose(read_points(tmp_path / "b.fcsv").positions, EXPECTED + SHIFT)


@pytest.mark.parametrize("space", ["LPS", "RAS"])
def test_slicers_markups(tmp_path: Path, space: str) -> None:
    (tmp_path / "a.mrk.json").write_text(json.dumps(markups(space)))
    points = read_points(tmp_path / "a.mrk.json")
    assert np.array_equal(points.positions, EXPECTED)
    write_points(points, EXPECTED * 2, tmp_path / "b.mrk.json")
    content = json.loads((tmp_path / "b.mrk.json").read_text(encoding="utf-8"))
    assert content["markups"][0]["display"] == {"opacity": 1}
    sign = -1 if space == "RAS" else 1
    assert content["markups"][0]["controlPoints"][0]["position"] == [sign * 20, sign * -40, 61]


def test_csv_with_names_without_and_in_the_plane(tmp_path: Path) -> None:
    for text, expected in (
        ("x,y,z,t,label\n10,-20,30.5,0,a\n1,2,-1,0,b\n", EXPECTED),  # as ANTs has it
        ("10,-20,30.5\n1,2,-1\n", EXPECTED),
        ("name,Z,Y,X\na,30.5,-20,10\nb,-1,2,1\n", EXPECTED),
        ("# a comment\nx,y\n10,-20\n\n1,2\n", EXPECTED[:, :2]),
    ):
        (tmp_path / "a.csv").write_text(text)
        points = read_points(tmp_path / "a.csv")
        assert np.array_equal(points.positions, expected), text
        write_points(points, expected + 1, tmp_path / "b.csv", overwrite=True)
        assert np.allclose(read_points(tmp_path / "b.csv").positions, expected + 1), text
    (tmp_path / "a.csv").write_text("x,y,z\n-10,20,30.5\n-1,-2,-1\n")
    assert np.array_equal(read_points(tmp_path / "a.csv", space="RAS").positions, EXPECTED)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.vtk", "1,2,3", "unknown extension"),
        ("a.csv", "", "holds no points"),
        ("a.csv", "x,y,z\n1,2\n", "line 2: '1,2' is not a point"),
        ("a.csv", "x,y,z\n1,2,nan\n", "not finite"),
        ("a.fcsv", "1,2,3,4\n", "names no CoordinateSystem"),
        ("a.fcsv", "# CoordinateSystem = IJK\n1,2,3,4\n", "coordinate system 'IJK'"),
        ("a.mrk.json", "{", "is not a markups file"),
        ("a.mrk.json", '{"markups": [{"coordinateSystem": "LPS", "controlPoints": [{}]}]}', "is not a markups file"),
        ("a.mrk.json", '{"markups": []}', "holds no points"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PointsError, match=message):
        read_points(tmp_path / name)


def test_nothing_is_overwritten_and_the_format_stays(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n")
    points = read_points(tmp_path / "a.csv")
    with pytest.raises(FileExistsError, match="exists already"):
        write_points(points, points.positions, tmp_path / "a.csv")
    with pytest.raises(PointsError, match=r"should end in \.csv"):
        write_points(points, points.positions, tmp_path / "b.fcsv")
    with pytest.raises(PointsError, match="does not exist"):
        read_points(tmp_path / "absent.csv")
