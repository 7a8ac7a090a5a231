"""What reaches the network through `carl evaluate --dataset`: the images as the paper prepares each dataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from carlreg import RegistrationAlgorithm, gradicon, save
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")

SHAPE = (11, 12, 13)
RAMP = np.linspace(-1000, 500, SHAPE[0])
"""Values along x, in Hounsfield units."""


class Enough(BaseException):
    """Stops the evaluation once the network has been called; not an Exception, so that nothing catches it."""


def write(path: Path, values: np.ndarray, dtype: type = np.float32) -> None:
    """A volume whose values change along x alone; x runs from right to left, as SimpleITK has it by default."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.broadcast_to(values, SHAPE[::-1]).astype(dtype)
    sitk.WriteImage(sitk.GetImageFromArray(data), str(path))


def hcp(root: Path) -> None:
    for name in ("100307", "103414"):
        write(root / "HCP_1200" / name / "T1w" / "T1w_acpc_dc_restore_brain.nii.gz", RAMP + 1000)
        labels = root / "manual_subcortical_segmentations_BWH" / name / f"{name}_ABC_novdc-label.nii.gz"
        write(labels, RAMP > 0, np.uint8)


def oasis(root: Path) -> None:
    for name in ("1101", "1104"):
        write(root / "val" / f"{name}.nii.gz", RAMP + 1000)
        write(root / "val" / f"{name}_labels.nii.gz", RAMP > 0, np.uint8)


def abdomen1k(root: Path) -> None:
    for case in range(800, 900):
        for name, values, dtype in (
            (f"AbdomenCT-1K-ImagePart1/Case_{case:05}_0000.nii.gz", RAMP, np.float32),
            (f"Mask/Case_{case:05}.nii.gz", RAMP > 0, np.uint8),
        ):
            write(root / name, values, dtype)


def learn2reg(root: Path) -> None:
    names = [f"./imagesTr/AbdomenCTCT_{n:04}_0000.nii.gz" for n in (1, 2)]
    for name in names:
        write(root / name, RAMP)
        write(root / name.replace("images", "labels"), RAMP > 0, np.uint8)
    listed = {"registration_val": [{"fixed": names[0], "moving": names[1]}]}
    (root / "AbdomenCTCT_dataset.json").write_text(json.dumps(listed))


def copdgene(root: Path) -> None:
    for phase in ("INSP", "EXP"):
        write(root / f"1_{phase}_STD.nii.gz", RAMP)
        write(root / f"1_{phase}_STD_label.nii.gz", np.arange(SHAPE[0]) < 5, np.uint8)


def stretched(values: np.ndarray, side: int) -> np.ndarray:
    """Linear interpolation that keeps the first and last voxel centres."""
    return np.interp(np.linspace(0, len(values) - 1, side), np.arange(len(values)), values)


LUNG = (RAMP.clip(-1000, 0) / 1000 + 1) * (np.arange(SHAPE[0]) < 5)
EXPECTED = {
    hcp: ((130, 155, 130), stretched(0.9 * (RAMP + 1000) / 1500, 130)),
    oasis: ((130, 155, 130), stretched(0.9 * (RAMP + 1000) / 1500, 130)),
    abdomen1k: ((175, 175, 175), stretched(RAMP / 500, 175)),
    learn2reg: ((175, 175, 175), stretched(RAMP / 500, 175)),
    copdgene: ((175, 175, 175), stretched(LUNG, 175)),
}


@pytest.mark.parametrize("dataset", EXPECTED, ids=lambda dataset: dataset.__name__)
def test_the_network_sees_what_the_paper_describes(dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(tmp_path / "data")
    widths = {"unet_down": (4,) * 5, "unet_up": (4,) * 5}
    save(gradicon(3, 2, **widths), tmp_path / "model.safetensors", metadata={"grid": "16 16 16"})
    seen = []

    def both(_: RegistrationAlgorithm, moving: torch.Tensor, fixed: torch.Tensor) -> None:
        seen.extend([moving, fixed])
        raise Enough

    monkeypatch.setattr(RegistrationAlgorithm, "both", both)
    words = ["evaluate", "--dataset", dataset.__name__, "--data", str(tmp_path / "data"), "--io-iterations", "0"]
    with pytest.raises(Enough):
        main([*words, "--model", str(tmp_path / "model.safetensors"), "--device", "cpu"])
    shape, profile = EXPECTED[dataset]
    for tensor in seen:
        assert tuple(tensor.shape) == (1, 1, *shape)
        along_x = tensor[0, 0, :, 70, 60].numpy()[::-1]  # the network's x runs from left to right
        assert np.allclose(along_x, profile, atol=1e-5)
