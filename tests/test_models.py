"""The paper's networks and their model files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL, paste, randomize, texture
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import carlreg
from carlreg import (
    CoordinateAttention,
    RegistrationAlgorithm,
    add_refinement,
    carl,
    carl_rot,
    gradicon,
    load,
    pretrained,
    save,
    warp,
    xi,
)
from carlreg.fast.layers import _TransposedConvolution, convolve_groups
from carlreg.model.encoder import Encoder
from carlreg.model.files import ModelFileError, describe, read_metadata
from carlreg.model.layers import conv, transposed_conv
from carlreg.model.shipped import WEIGHTS, available
from carlreg.model.unet import UNet
from carlreg.model.zoo import first_step


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts() -> None:
    """Numbers of parameters of the paper's and the authors' networks in 3-D: 3.99 M, 17.67 M and 57.0 M."""
    assert parameters(Encoder(3)) == 3_986_816
    assert parameters(UNet(3)) == 17_670_229
    assert parameters(carl()) == 3_986_816 + 3 * 17_670_229 == 56_997_503
    assert parameters(gradicon()) == 4 * 17_670_229


def test_carl_is_the_papers_expression() -> None:
    """TwoStep{TwoStep{Down{TwoStep{Down{Ξθ}, Ψ1}}, Ψ2}, Ψ3}."""

    def expression(part: dict[str, object]) -> str:
        inner = [expression(v) for v in (part.get("phi"), part.get("psi")) if isinstance(v, dict)]
        names = {"Downsample": "Down", "CoordinateAttention": "Ξ", "PredictDisplacement": "Ψ"}
        name = names.get(str(part["part"]), str(part["part"]))
        return f"{name}{{{', '.join(inner)}}}" if inner else name

    assert expression(describe(carl())) == "TwoStep{TwoStep{Down{TwoStep{Down{Ξ}, Ψ}}, Ψ}, Ψ}"
    assert expression(describe(carl(refinements=2))) == "TwoStep{Down{TwoStep{Down{Ξ}, Ψ}}, Ψ}"
    assert expression(describe(gradicon())) == "TwoStep{TwoStep{Down{TwoStep{Down{Ψ}, Ψ}}, Ψ}, Ψ}"
    assert expression(describe(xi())) == "Down{Down{Ξ}}"
    assert expression(describe(first_step(carl()))) == "Down{Down{Ξ}}"


def test_only_two_or_three_refinements() -> None:
    with pytest.raises(ValueError, match="refinements is 4; expected 2"):
        carl(refinements=4)


@pytest.mark.parametrize("make", [carl, carl_rot])
def test_adding_a_refinement_changes_nothing_at_first(make: type) -> None:
    pair = texture(32, 32), texture(32, 32)
    model = randomize(make(2, 2, width=4, **SMALL).double(), *pair)
    larger = add_refinement(model)
    assert torch.allclose(larger(*pair).on_grid_of(pair[1]), model(*pair).on_grid_of(pair[1]), atol=1e-9)
    assert describe(larger) == describe(make(2, 3, width=4, **SMALL))
    assert not larger.training
    nn.init.normal_(larger.psi.network.last.weight)
    assert not torch.allclose(larger(*pair).on_grid_of(pair[1]), model(*pair).on_grid_of(pair[1]))


@pytest.mark.parametrize("make", [carl, carl_rot, gradicon])
def test_the_first_step_shares_the_models_weights(make: type) -> None:
    options = dict(SMALL) if make is gradicon else {"width": 4, **SMALL}
    model, pair = make(2, 3, **options).double(), (texture(32, 32), texture(32, 32))
    first = first_step(model.eval())
    assert torch.allclose(first(*pair).on_grid_of(pair[1]), model(*pair).on_grid_of(pair[1]), atol=1e-9)  # so far
    own = {id(p) for p in model.parameters()}
    assert {id(p) for p in first.parameters()} < own
    assert len(own) - len(list(first.parameters())) == 3 * len(list(UNet(2).parameters()))


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> RegistrationAlgorithm:
    return randomize(carl(2, width=4, **SMALL), torch.rand(1, 1, 32, 32), torch.rand(1, 1, 32, 32))


@pytest.mark.parametrize("make", [carl, carl_rot, gradicon, xi])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_model_comes_back_from_its_file_alone(make: type, dim: int, tmp_path: Path) -> None:
    options = {} if make is xi else dict(SMALL)
    if make is not gradicon:
        options["width"] = 4
    pair = torch.rand(2, 1, 1, *(20,) * dim)
    model = randomize(make(dim, **options), *pair)
    save(model, tmp_path / "model.safetensors", metadata={"name": "a test", "licence": "none"})
    back = load(tmp_path / "model.safetensors")
    assert torch.equal(back(*pair).on_grid_of(pair[1]), model(*pair).on_grid_of(pair[1]))
    assert describe(back) == describe(model)
    assert not back.training
    assert read_metadata(tmp_path / "model.safetensors")["licence"] == "none"


def test_half_precision_files(model: RegistrationAlgorithm, tmp_path: Path) -> None:
    save(model, tmp_path / "half", dtype=torch.float16)
    save(model, tmp_path / "full")
    assert os.path.getsize(tmp_path / "half") < 0.7 * os.path.getsize(tmp_path / "full")
    back = load(tmp_path / "half")
    assert all(p.dtype == torch.float32 for p in back.parameters())
    for name, weight in model.named_parameters():
        assert torch.allclose(back.get_parameter(name), weight, rtol=1e-3, atol=1e-6)


def test_a_failed_write_leaves_the_old_file(
    model: RegistrationAlgorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    save(model, path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(model, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]


def test_refused_files(model: RegistrationAlgorithm, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    save(model, good)
    header, tensors = read_metadata(good), load_file(good)

    with pytest.raises(FileNotFoundError, match="no model file at"):
        load(tmp_path / "absent")
    bad.write_bytes(b"not a model at all")
    with pytest.raises(ModelFileError, match="is not a model file, or it is damaged"):
        load(bad)
    bad.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="is not a model file, or it is damaged"):
        load(bad)
    torch.save(model.state_dict(), bad)
    with pytest.raises(ModelFileError, match="is not a model file"):
        load(bad)
    save_file(tensors, bad)
    with pytest.raises(ModelFileError, match="has the format None; expected 'carlreg-1'"):
        load(bad)
    save_file(tensors, bad, {**header, "architecture": header["architecture"].replace("TwoStep", "ThreeStep")})
    with pytest.raises(ModelFileError, match="has an unknown part 'ThreeStep'; expected one of"):
        load(bad)
    save_file(tensors, bad, {**header, "architecture": header["architecture"].replace('"length"', '"breadth"')})
    with pytest.raises(ModelFileError, match="CoordinateAttention cannot be built from"):
        load(bad)
    for broken in ('{"part": []}', '"text"', header["architecture"].replace('"dim": 2', '"dim": 7')):
        save_file(tensors, bad, {**header, "architecture": broken})
        with pytest.raises(ModelFileError):
            load(bad)
    save_file(tensors, bad, {**header, "architecture": "{"})
    with pytest.raises(ModelFileError, match="its architecture is not valid JSON"):
        load(bad)
    name = next(name for name in tensors if name.endswith("weight"))
    save_file({k: v for k, v in tensors.items() if k != name}, bad, header)
    with pytest.raises(ModelFileError, match=f"does not match its own architecture: it lacks {name}"):
        load(bad)
    save_file({**tensors, "extra": torch.zeros(1)}, bad, header)
    with pytest.raises(ModelFileError, match="it has unknown extra"):
        load(bad)
    save_file({**tensors, name: torch.zeros(3)}, bad, header)
    with pytest.raises(ModelFileError, match=f"it has wrong shapes for {name}"):
        load(bad)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, bad, header)
    with pytest.raises(ModelFileError, match=f"damaged: {name} holds values that are not finite"):
        load(bad)


def test_a_foreign_part_cannot_be_saved(tmp_path: Path) -> None:
    class Mine(carlreg.Downsample):
        pass

    with pytest.raises(TypeError, match="cannot describe a Mine"):
        save(Mine(xi(2, width=4)), tmp_path / "model")
    assert os.listdir(tmp_path) == []


# ---- the public list ------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert carlreg.__all__ == sorted(carlreg.__all__)
    assert dir(carlreg) == sorted([*carlreg.__all__, "__version__"])
    for name in carlreg.__all__:
        assert getattr(carlreg, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        carlreg.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, carlreg; print(sorted({'torch', 'numpy', 'SimpleITK'} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_product_for_weight_gradients_is_the_gradient(dim: int) -> None:
    layer = transposed_conv(dim)(5, 3, 4, stride=2, padding=1).double()
    features = torch.rand(2, 5, *(6, 4, 7)[:dim], dtype=torch.float64, requires_grad=True)
    inputs = features, layer.weight, layer.bias
    expected, answer = layer(features), _TransposedConvolution.apply(*inputs)
    assert torch.equal(answer, expected)
    upstream = torch.rand_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(answer, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("side", [8, 13])
def test_convolution_in_groups_is_the_same_convolution(dim: int, side: int) -> None:
    layer = conv(dim)(5, 3, 3, padding=1).double()
    features = torch.rand(2, 5, *(6, 7)[: dim - 1], side, dtype=torch.float64)
    assert torch.allclose(convolve_groups(layer, features), layer(features), atol=1e-12)


# ---- trained models -------------------------------------------------------------------------------------------------


def test_the_default_model_is_in_the_package() -> None:
    model = pretrained()
    assert "carl-base" in available()
    assert not model.training
    header = read_metadata(WEIGHTS / "carl-base.safetensors")
    assert "research use" in header["licence"]
    assert os.path.getsize(WEIGHTS / "carl-base.safetensors") <= 20 * 2**20


def test_the_model_for_rotations_is_in_the_package() -> None:
    model = pretrained("rot")
    assert "carl-rot" in available()
    header = read_metadata(WEIGHTS / "carl-rot.safetensors")
    assert "research use" in header["licence"]
    assert (header["grid"], header["voxel"]) == ("96 96 96", "2")
    assert os.path.getsize(WEIGHTS / "carl-rot.safetensors") <= 12 * 2**20
    parts = [type(module).__name__ for module in model.modules()]
    assert {"Symmetrized", "Handedness"} <= set(parts)
    (xi,) = (module for module in model.modules() if isinstance(module, CoordinateAttention))
    assert xi.extrapolate == "mirror"


def test_the_model_for_pictures_is_in_the_package() -> None:
    model = pretrained("2d")
    header = read_metadata(WEIGHTS / "carl-2d.safetensors")
    assert "research use" in header["licence"]
    assert header["grid"] == "256 256"
    assert os.path.getsize(WEIGHTS / "carl-2d.safetensors") <= 3 * 2**20
    rows, columns = torch.meshgrid(torch.arange(256.0), torch.arange(256.0), indexing="ij")

    def blobs(shift: float) -> Tensor:
        centres = ((90, 80, 14), (140, 150, 20), (100, 170, 9), (170, 100, 11))
        return sum((-((rows - y) ** 2 + (columns - x - shift) ** 2) / r**2).exp() for y, x, r in centres)[None, None]

    moving, fixed = blobs(0), blobs(12)
    with torch.no_grad():
        warped = warp(moving, model(moving, fixed), like=fixed)
    assert (warped - fixed).abs().mean() < 0.5 * (moving - fixed).abs().mean()


def test_checksums_are_of_the_files_that_are_there() -> None:
    lines = (WEIGHTS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    named = {name: digest for digest, name in (line.split() for line in lines)}
    assert named.keys() == {f"{name}.safetensors" for name in available()}
    for name, digest in named.items():
        assert hashlib.sha256((WEIGHTS / name).read_bytes()).hexdigest() == digest


def test_values_too_large_for_half_floats_stay_as_they_are(tmp_path: Path) -> None:
    model = xi(2, width=4).eval()
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    norm.running_var.fill_(1e6)  # type: ignore[union-attr]
    next(model.parameters()).data.fill_(1e7)
    save(model, tmp_path / "model.safetensors", dtype=torch.float16)
    again = load(tmp_path / "model.safetensors").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(again[name].double(), tensor.double(), rtol=1e-3, atol=1e-4), name
    norm.running_var.fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="running_var has values that are not finite; the file was not written"):
        save(model, tmp_path / "other.safetensors", dtype=torch.float16)
    assert not (tmp_path / "other.safetensors").exists()


def test_the_default_model_follows_a_shift() -> None:
    """Trained weights, the paper's feature length: blobs on a blank ground, one image shifted by 8 voxels."""
    model = pretrained()
    torch.manual_seed(3)
    coarse = torch.rand(1, 1, 7, 7, 7)
    patch = torch.nn.functional.interpolate(coarse, size=(40, 40, 40), mode="trilinear")
    fixed = paste(patch, (64, 64, 64), (12, 12, 12))
    moving = paste(patch.flip(4) * 0.5 + patch * 0.5, (64, 64, 64), (12, 12, 12))
    shifted = moving.roll(8, dims=3)
    points = 0.35 + 0.15 * torch.rand(1, 500, 3)
    with torch.no_grad():
        change = 63 * (model(shifted, fixed)(points) - model(moving, fixed)(points))
    assert (change - torch.tensor([0.0, 8.0, 0.0])).norm(dim=-1).median() < 0.5


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="no model named 'magic'; this package has carl-2d, carl-base"):
        pretrained("magic")
