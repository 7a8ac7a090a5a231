"""Names of labels: well-known tables and the files that users have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL

import carlreg
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.files.images import Image, write
from carlreg.files.label_names import TABLES, guess_names, read_names

FILES = {
    "plain.csv": "1,spleen\n6,liver\n",
    "headed.csv": "Label Number,Label Name,Class\n1,spleen,organ\n6,liver,organ\n",
    "bids.tsv": "index\tname\tcolor\n1\tspleen\t#ff0000\n6\tliver\t#00ff00\n",
    "swapped.csv": "name;label\nspleen;1\nliver;6\n",
    "freesurfer.txt": "# a comment\n\n0 Unknown 0 0 0 0\n1 spleen 25 5 25 0\n6 liver 70 130 180 0\n",
    "snap.label": '# ITK-SNAP\n    0     0    0    0        0  0  0    "Clear Label"\n'
    '    1   255    0    0        1  1  1    "spleen"\n    6     0  255    0        1  1  1    "liver"\n',
}


@pytest.mark.parametrize("name", FILES)
def test_tables_as_users_have_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    names = read_names(tmp_path / name)
    assert {label: text for label, text in names.items() if label} == {1: "spleen", 6: "liver"}


@pytest.mark.parametrize("text", ["", "spleen\n", "x,y,z\n1,2,3\n", "1\n2\n", "1 2 3\n4 5 6\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="names no labels; expected a row for each"):
        read_names(tmp_path / "names.csv")


def test_well_known_tables() -> None:
    assert read_names("BTCV")[6] == "liver"
    assert read_names("acdc") == {1: "right ventricle", 2: "myocardium", 3: "left ventricle"}
    assert read_names("freesurfer")[17] == "left hippocampus"
    assert read_names("freesurfer")[2035] == "right insula"
    assert sorted(TABLES["totalsegmentator"]) == list(range(1, 118))
    assert {TABLES["totalsegmentator"][n] for n in (51, 92, 115)} == {"heart", "left rib 1", "right rib 12"}
    assert read_names({"3": "x"}) == {3: "x"}
    with pytest.raises(InputError, match=r"nothing does not exist; expected a CSV file .* one of acdc, amos"):
        read_names("nothing")


def test_freesurfers_numbers_are_recognised() -> None:
    usual = [2, 3, 4, 7, 8, 10, 11, 12, 13, 17, 41, 42, 49, 53]
    assert guess_names([0, *usual])[53] == "right hippocampus"
    assert guess_names(range(1, 36)) == {}  # counted
    assert guess_names([2, 3, 4, 41]) == {}  # too few to be sure
    assert guess_names([*usual, 9999]) == {}


def test_the_command_stores_and_shows_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("SimpleITK")
    carlreg.save(carlreg.gradicon(3, 2, **SMALL), tmp_path / "net.safetensors", metadata={"grid": "16 16 16"})
    index = np.indices((18, 20, 16)).astype(np.float32)
    words: list[object] = ["register", "--model", tmp_path / "net.safetensors", "--io-iterations", 0, "--quiet"]
    for n, name in enumerate(("fixed", "moving")):
        image = np.sin(index[0] / 3 + n) + np.cos(index[1] / 4) * np.sin(index[2] / 3)
        write(Image(image, np.eye(4)), tmp_path / f"{name}.nii")
        write(Image((6 * (image > 0.5)).astype(np.uint8), np.eye(4)), tmp_path / f"{name}_seg.nii")
        words += [f"--{name}", tmp_path / f"{name}.nii", f"--{name}-seg", tmp_path / f"{name}_seg.nii"]
    assert main([str(word) for word in (*words, "-o", tmp_path / "out", "--label-names", "btcv")]) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["label_names"]["6"] == "liver"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '<tr data-label="6"><th>liver</th>' in page
    assert "fixed_labels" in page
    capsys.readouterr()
    assert main([str(word) for word in (*words, "-o", tmp_path / "other", "--label-names", tmp_path / "no.csv")]) == 1
    assert "no.csv does not exist; expected a CSV file" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
