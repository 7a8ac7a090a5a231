"""The paper's datasets on small trees in their true layout and formats."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import Identity, RegistrationAlgorithm, gradicon, save
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.evaluation.api import evaluate
from carlreg.evaluation.sources import identity
from carlreg.files.images import from_array, map_points, write
from carlreg.paper_data import DATASETS, abdomen1k, copdgene, dirlab, hcp, learn2reg, oasis, retina

SHARED = Path(__file__).parents[2] / "shared"

APPENDIX = """
00817 00872, 00808 00832, 00815 00863, 00857 00860, 00883 00848, 00826 00812, 00862 00803, 00849 00855, 00877 00800,
00857 00834, 00829 00875, 00813 00840, 00803 00802, 00803 00883, 00869 00801, 00848 00887, 00827 00854, 00803 00867,
00828 00856, 00863 00870, 00829 00844, 00829 00886, 00828 00858, 00837 00802, 00853 00871, 00882 00812, 00823 00880,
00837 00815, 00842 00864, 00854 00864
"""


def volume(path: Path, *, labels: bool = False, values: int = 3, shape: tuple[int, ...] = (7, 6, 5)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(path.name))
    data = rng.integers(1, values + 1, shape) if labels else rng.integers(-1000, 500, shape)
    write(from_array(data.astype(np.uint8 if labels else np.int16)), path)


# ---- Abdomen1K ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def abdomen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("abdomen")
    for number, case in enumerate(sorted({case for pair in abdomen1k.TEST_PAIRS for case in pair})):
        volume(root / f"AbdomenCT-1K-ImagePart{1 + number % 3}" / f"Case_{case:05}_0000.nii.gz")
        volume(root / "Mask" / f"Case_{case:05}.nii.gz", labels=True, values=4)
    return root


def test_the_30_abdomen_pairs_are_the_paper_s() -> None:
    expected = [(int(a), int(b)) for a, b in re.findall(r"(\d+) (\d+)", APPENDIX)]
    assert list(abdomen1k.TEST_PAIRS) == expected
    assert len(expected) == 30
    assert all(case in abdomen1k.SPLITS["test"] for pair in expected for case in pair)
    paper = SHARED / "paper" / "carl_cvpr2025.tex"
    if paper.is_file():
        text = paper.read_text(encoding="utf-8")
        text = text[text.index("We used the following 30 image pairs") :]
        assert [(int(a), int(b)) for a, b in re.findall(r"^(\d{5}) (\d{5})", text, re.MULTILINE)] == expected


def test_abdomen_pairs_are_found_and_evaluated(abdomen: Path) -> None:
    pairs = abdomen1k.pairs(abdomen)
    assert len(pairs) == 30
    assert pairs[0].name == "00817_to_00872"
    assert pairs[0].moving is not None
    assert pairs[0].moving.name == "Case_00817_0000.nii.gz"
    assert pairs[0].moving_seg == abdomen / "Mask" / "Case_00817.nii.gz"
    found = evaluate(pairs[:2], {"before": identity}, labels=list(abdomen1k.LABELS), names=abdomen1k.LABELS)
    assert [found.label_name(label) for label in found.labels] == ["liver", "kidney", "spleen", "pancreas"]
    assert not any(scores.failures for scores in found.scores)
    with pytest.raises(InputError, match="holds no pair of images"):
        abdomen1k.pairs(abdomen, "val")
    for case in (900, 903):
        volume(abdomen / "AbdomenCT-1K-ImagePart1" / f"Case_{case:05}_0000.nii.gz")
        volume(abdomen / "Mask" / f"Case_{case:05}.nii.gz", labels=True)
    assert [pair.name for pair in abdomen1k.pairs(abdomen, "val")] == ["00903_to_00900", "00900_to_00903"]


def test_abdomen_from_the_command_line(abdomen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--dataset", "abdomen1k", "--data", str(abdomen), "--method", "before=identity"]
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    assert "pancreas" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "scores.json").read_text(encoding="utf-8"))
    assert len(found["scores"]) == 30
    assert main(["evaluate", "--dataset", "abdomen1k", "--data", str(tmp_path), "--method", "a=identity"]) == 1
    assert "lacks AbdomenCT-1K-ImagePart1/Case_00800_0000.nii.gz and 87 more of 88 files" in capsys.readouterr().err
    assert main(["evaluate", "--dataset", "retina", "--data", str(tmp_path), "--method", "a=identity"]) == 1
    assert "no dataset 'retina'" in capsys.readouterr().err


def test_abdomen_preprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abdomen1k, "GRID", (9, 9, 9))
    data = np.full((7, 6, 5), -1000, np.int16)
    data[3] = 500
    tensor, _ = abdomen1k.preprocess(from_array(data))
    assert tensor.shape == (1, 1, 9, 9, 9)
    assert tensor.max() == 1
    assert tensor.min() == -2


# ---- HCP ------------------------------------------------------------------------------------------------------------


def test_hcp(tmp_path: Path) -> None:
    for name in ("100307", "103414", "105115", "110411", "110613"):
        volume(tmp_path / "HCP_1200" / name / "T1w" / "T1w_acpc_dc_restore_brain.nii.gz")
    for name in ("100307", "103414", "105115"):
        folder = tmp_path / "manual_subcortical_segmentations_BWH" / name
        volume(folder / f"{name}_ABC_novdc-label.nii.gz", labels=True)
    pairs = hcp.pairs(tmp_path)
    assert len(pairs) == 6  # all there are of 3 subjects
    assert len({pair.name for pair in pairs}) == 6
    assert [pair.name for pair in hcp.pairs(tmp_path)] == [pair.name for pair in pairs]
    assert {pair.name for pair in hcp.pairs(tmp_path, "train")} == {"110411_to_110613", "110613_to_110411"}
    (tmp_path / "HCP_1200" / "103414" / "T1w" / "T1w_acpc_dc_restore_brain.nii.gz").unlink()
    with pytest.raises(InputError, match=r"lacks HCP_1200/103414/T1w/T1w_acpc_dc_restore_brain.nii.gz"):
        hcp.pairs(tmp_path)
    with pytest.raises(InputError, match="is not a folder; expected HCP_1200"):
        hcp.pairs(tmp_path / "nowhere")


def test_hcp_preprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hcp, "GRID", (8, 9, 8))
    tensor, _ = hcp.preprocess(from_array(np.random.default_rng(0).integers(0, 900, (8, 9, 8)).astype(np.int16)))
    assert tensor.shape == (1, 1, 8, 9, 8)
    assert float(tensor.max()) == pytest.approx(0.9)


# ---- COPDGene and DIR-Lab -------------------------------------------------------------------------------------------


def test_copdgene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("13216S", "12042G"):
        for phase in ("INSP", "EXP"):
            start = tmp_path / name / f"{name}_{phase}_STD_USD_COPD"
            volume(start.with_name(start.name + ".nii.gz"))
            volume(start.with_name(start.name + "_label.nii.gz"), labels=True, values=1)
    pairs = copdgene.pairs(tmp_path)
    assert len(pairs) == 2
    assert pairs[0].fixed is not None
    assert pairs[0].fixed.name == "12042G_EXP_STD_USD_COPD.nii.gz"
    assert pairs[0].moving_mask == tmp_path / "12042G" / "12042G_INSP_STD_USD_COPD_label.nii.gz"
    pairs[1].fixed_mask.unlink()  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"lacks 13216S/13216S_EXP_STD_USD_COPD_label.nii.gz"):
        copdgene.pairs(tmp_path)
    monkeypatch.setattr(copdgene, "GRID", (4, 4, 4))
    scan = from_array(np.array([-1200, -1000, -500, 200], np.int16)[:, None, None] * np.ones((4, 4, 4), np.int16))
    mask = from_array(np.ones((4, 4, 4), np.uint8))
    rows = copdgene.preprocess(scan, mask)[0][0, 0].amax((1, 2)).tolist()
    assert sorted(rows) == [0, 0, 0.5, 1]
    assert copdgene.preprocess(scan, from_array(np.zeros((4, 4, 4), np.uint8)))[0].abs().max() == 0


@pytest.fixture
def lungs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten cases in DIR-Lab's format, in small: fewer voxels in plane, two landmarks each."""
    monkeypatch.setattr(dirlab, "IN_PLANE", 16)
    for case, (slices, _) in dirlab.CASES.items():
        folder = tmp_path / case / case
        folder.mkdir(parents=True)
        for phase in "ie":
            data = np.zeros((slices, 16, 16), "<i2")  # z, y, x on disk
            data[4, 5, 6] = 700 + len(phase)
            (data - 1000).tofile(folder / f"{case}_{phase}BHCT.img")
        (folder / f"{case}_300_iBH_xyz_r1.txt").write_text("7\t6\t5 \n10\t3\t20 \n")
        (folder / f"{case}_300_eBH_xyz_r1.txt").write_text("7\t6\t5 \n14\t6\t22 \n")
    return tmp_path


def test_dirlab_landmark_errors_in_mm(lungs: Path) -> None:
    """One pair of landmarks is the same, the other (4, 3, 2) voxels apart, of another size in each direction."""
    pairs = dirlab.pairs(lungs)
    assert [pair.name for pair in pairs] == [f"copd{n}" for n in range(1, 11)]
    found = evaluate(pairs, {"before": identity}, dataset=dirlab.DATASET)
    assert not any(scores.failures for scores in found.scores)
    for scores, (_, side) in zip(found.scores, dirlab.CASES.values(), strict=True):
        assert scores.tre_mm[0] == 0
        assert scores.tre_mm[1] == pytest.approx(np.linalg.norm([4 * side, 3 * side, 2 * 2.5]))


def test_dirlab_axis_order_and_one_based_indices(lungs: Path) -> None:
    """The bright voxel is at x, y, z = 6, 5, 4 counted from 0, where the first landmark, 7, 6, 5, counts from 1."""
    pair = dirlab.pairs(lungs)[1]
    image = dirlab.read(pair.moving)
    assert image.shape == (16, 16, 102)
    assert image.spacing == pytest.approx((0.645, 0.645, 2.5))
    assert np.unravel_index(image.data.argmax(), image.shape) == (6, 5, 4)
    assert pair.moving_landmarks is not None
    points = dirlab.read_landmarks(pair.moving_landmarks, image)
    assert np.allclose(points[0], map_points(image.affine, [6, 5, 4]))
    assert points[0, 2] < 0  # the fifth slice lies below the first


def test_dirlab_says_what_is_wrong(lungs: Path) -> None:
    volume_file = lungs / "copd3" / "copd3" / "copd3_eBHCT.img"
    volume_file.write_bytes(volume_file.read_bytes()[:-2])
    scores = evaluate(dirlab.pairs(lungs)[2:3], {"before": identity}, dataset=dirlab.DATASET).scores[0]
    assert "bytes; expected 64512 for (16, 16, 126) voxels of 16 bits" in scores.failures[0]
    (lungs / "copd4" / "copd4" / "copd4_300_iBH_xyz_r1.txt").unlink()
    with pytest.raises(InputError, match=r"lacks copd4/copd4_300_iBH_xyz_r1.txt"):
        dirlab.pairs(lungs)
    with pytest.raises(ValueError, match="not named after one of the ten cases"):
        dirlab.read(lungs / "copd11_iBHCT.img")
    text = lungs / "x.txt"
    text.write_text("1 2 a\n")
    with pytest.raises(ValueError, match="expected rows of three numbers"):
        dirlab.read_landmarks(text, from_array(np.zeros((4, 4, 4), np.int16)))


def test_dirlab_shows_the_network_lungs_alone(
    lungs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: 175³, −1000…0 HU to 0…1 inside the masks, and one line where a mask is missing."""
    seen: list[torch.Tensor] = []

    def both(_: RegistrationAlgorithm, moving: torch.Tensor, fixed: torch.Tensor) -> tuple[Identity, Identity]:
        seen.extend([moving, fixed])
        raise InputError("enough")

    monkeypatch.setattr(RegistrationAlgorithm, "both", both)
    for phase in "ie":
        mask = np.zeros((16, 16, 121), np.uint8)
        mask[8:] = 1
        image = dirlab.read(lungs / "copd1" / "copd1" / f"copd1_{phase}BHCT.img")
        write(from_array(mask, image.affine), lungs / "copd1" / "copd1" / f"copd1_{phase}BHCT_mask.nii.gz")
        data = np.full((121, 16, 16), -400, "<i2")
        data[:, :, 15] = 300
        data.tofile(lungs / "copd1" / "copd1" / f"copd1_{phase}BHCT.img")
    save(gradicon(3, 2, **SMALL), tmp_path / "model.safetensors", metadata={"grid": "16 16 16"})
    words = ["evaluate", "--dataset", "dirlab", "--data", str(lungs), "--model", str(tmp_path / "model.safetensors")]
    assert main([*words, "--device", "cpu"]) == 1
    assert len(seen) == 2
    for tensor in seen:
        assert tensor.shape == (1, 1, 175, 175, 175)
        along_x = tensor[0, 0, :, 80, 80].flip(0)  # right to left, as stored
        assert along_x[:80].abs().max() == 0
        assert along_x[100:150].tolist() == pytest.approx([0.6] * 50)
        assert float(along_x[-1]) == 1
    assert "copd2_eBHCT.img has no lung mask; expected one beside it" in capsys.readouterr().err


def test_dirlab_values_stored_shifted(lungs: Path) -> None:
    path = lungs / "copd1" / "copd1" / "copd1_iBHCT.img"
    np.full((121, 16, 16), 24, "<i2").tofile(path)
    assert dirlab.read(path).data.max() == -1000


# ---- Learn2Reg ------------------------------------------------------------------------------------------------------


def test_learn2reg(tmp_path: Path) -> None:
    names = [f"./imagesTr/AbdomenCTCT_{n:04}_0000.nii.gz" for n in (1, 2, 3)]
    listed = {
        "name": "AbdomenCTCT",
        "training": [{"image": name, "label": name.replace("images", "labels")} for name in names],
        "registration_val": [{"fixed": names[0], "moving": names[1]}, {"fixed": names[2], "moving": names[0]}],
    }
    (tmp_path / learn2reg.FILE).write_text(json.dumps(listed))
    for name in names:
        volume(tmp_path / name)
        volume(tmp_path / name.replace("images", "labels"), labels=True, values=13, shape=(8, 8, 8))
    pairs = learn2reg.pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["0002_to_0001", "0001_to_0003"]
    assert pairs[0].moving_seg == tmp_path / "labelsTr" / "AbdomenCTCT_0002_0000.nii.gz"
    assert len(learn2reg.pairs(tmp_path, "train")) == 3 * 2
    assert learn2reg.LABELS[6] == "liver"
    assert len(learn2reg.LABELS) == 13
    with pytest.raises(ValueError, match="lists nothing under 'registration_test'"):
        learn2reg.pairs(tmp_path, "test")
    (tmp_path / "labelsTr" / "AbdomenCTCT_0003_0000.nii.gz").unlink()
    with pytest.raises(InputError, match=r"lacks labelsTr/AbdomenCTCT_0003_0000.nii.gz"):
        learn2reg.pairs(tmp_path)
    (tmp_path / learn2reg.FILE).write_text('{"registration_val": [{"fixed": "a"}]}')
    with pytest.raises(ValueError, match="without fixed and moving"):
        learn2reg.pairs(tmp_path)
    (tmp_path / learn2reg.FILE).unlink()
    with pytest.raises(InputError, match=r"lacks AbdomenCTCT_dataset.json"):
        learn2reg.pairs(tmp_path)


# ---- OASIS ----------------------------------------------------------------------------------------------------------


def test_oasis_in_both_layouts(tmp_path: Path) -> None:
    for name in ("1101", "1104", "1107"):
        volume(tmp_path / "ours" / "val" / f"{name}.nii.gz")
        volume(tmp_path / "ours" / "val" / f"{name}_labels.nii.gz", labels=True)
        volume(tmp_path / "malc" / "testing-images" / f"{name}_3.nii.gz")
        volume(tmp_path / "malc" / "testing-labels" / f"{name}_3_glm.nii.gz", labels=True)
    ours, malc = oasis.pairs(tmp_path / "ours"), oasis.pairs(tmp_path / "malc")
    assert len(ours) == len(malc) == 6
    assert ours[0].name == "1104_to_1101"
    assert malc[0].fixed_seg == tmp_path / "malc" / "testing-labels" / "1101_3_glm.nii.gz"
    assert oasis.LABELS[47] == "right hippocampus"
    assert len(oasis.LABELS) == 14
    (tmp_path / "ours" / "val" / "1104_labels.nii.gz").unlink()
    with pytest.raises(InputError, match=r"lacks val/1104_labels.nii.gz"):
        oasis.pairs(tmp_path / "ours")
    with pytest.raises(InputError, match="holds no pair of images"):
        oasis.pairs(tmp_path)


@pytest.mark.skipif(not (SHARED / "data" / "brain").is_dir(), reason="needs the shared data")
def test_oasis_on_the_real_brains() -> None:
    pairs = oasis.pairs(SHARED / "data" / "brain")
    assert len(pairs) == 8 * 7
    assert len(oasis.pairs(SHARED / "data" / "brain", "train")) == 15 * 14


# ---- retina ---------------------------------------------------------------------------------------------------------


def gif_bytes(image: np.ndarray, *, local: bool = False, interlaced: bool = False) -> bytes:
    """A GIF of 0 and 1 in black and white, its LZW table cleared before it could grow: every code has 3 bits."""
    height, width = image.shape
    rows = image
    if interlaced:
        order = [r for start, step in ((0, 8), (4, 8), (2, 4), (1, 2)) for r in range(start, height, step)]
        rows = image[order]
    codes: list[int] = []
    for number, value in enumerate(rows.ravel().tolist()):
        codes += ([4] if number % 2 == 0 else []) + [value]
    bits = "".join(f"{code:03b}"[::-1] for code in [*codes, 5])
    packed = bytes(int(bits[k : k + 8][::-1], 2) for k in range(0, len(bits), 8))
    blocks = b"".join(bytes([len(packed[k : k + 255])]) + packed[k : k + 255] for k in range(0, len(packed), 255))
    palette = bytes([0, 0, 0, 255, 255, 255])
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    flags = 0x40 * interlaced | 0x80 * local
    head = b"GIF89a" + size + bytes([0 if local else 0x80, 0, 0]) + (b"" if local else palette)
    extension = b"\x21\xf9\x04" + bytes(4) + b"\0"
    return (
        head
        + extension
        + b"\x2c"
        + bytes(4)
        + size
        + bytes([flags])
        + (palette if local else b"")
        + b"\x02"
        + blocks
        + b"\0;"
    )


@pytest.mark.parametrize("options", [{}, {"local": True}, {"interlaced": True}])
def test_gif(tmp_path: Path, options: dict[str, bool]) -> None:
    image = np.random.default_rng(0).integers(0, 2, (37, 23))
    path = tmp_path / "21_manual1.gif"
    path.write_bytes(gif_bytes(image, **options))
    assert (retina.read_gif(path) == 255 * image).all()
    assert (retina.read(path).data == image.T).all()
    path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(ValueError, match=r"21_manual1.gif cannot be read as a GIF"):
        retina.read_gif(path)
    path.write_bytes(b"PNG")
    with pytest.raises(ValueError, match="cannot be read as a GIF"):
        retina.read_gif(path)


def test_gif_against_pillow(tmp_path: Path) -> None:
    """Large enough for the LZW table to fill up, with grey values and with two."""
    pillow = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for levels in (256, 2):
        image = rng.integers(0, levels, (120, 90)).astype(np.uint8) * np.uint8(255 // (levels - 1))
        pillow.fromarray(image).save(tmp_path / "x.gif")
        assert (retina.read_gif(tmp_path / "x.gif") == image).all()


def test_retina_split(tmp_path: Path) -> None:
    for number in range(21, 40):
        (tmp_path / f"{number}_manual1.gif").write_bytes(gif_bytes(np.eye(8, dtype=int)))
    with pytest.raises(InputError, match="holds 19 images; expected 20"):
        retina.files(tmp_path)
    (tmp_path / "40_manual1.gif").write_bytes(gif_bytes(np.eye(8, dtype=int)))
    train, test = retina.files(tmp_path, "train"), retina.files(tmp_path, "test")
    assert [file.stem for file in test] == [f"{n}_manual1" for n in range(35, 41)]
    assert len(train) == 14
    pooled = retina.preprocess(retina.read(test[0]))
    assert pooled.shape == (1, 1, 2, 2)
    assert pooled.flatten().tolist() == [0.25, 0, 0, 0.25]


@pytest.mark.skipif(not (SHARED / "data" / "retina").is_dir(), reason="needs the shared data")
def test_real_gifs_against_pillow() -> None:
    pillow = pytest.importorskip("PIL.Image")
    for file in retina.files(SHARED / "data" / "retina", "test"):
        expected = np.array(pillow.open(file).convert("L"))
        assert expected.shape == (584, 565)
        assert (retina.read_gif(file) == expected).all()


def test_every_dataset_has_the_same_doors() -> None:
    for name in DATASETS:
        module = importlib.import_module(f"carlreg.paper_data.{name}")
        for door in ("pairs", "preprocess", "DATASET"):
            assert hasattr(module, door), (name, door)
