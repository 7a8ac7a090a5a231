"""`carl doctor`: green where all is well, red with advice where something is wrong."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from carlreg import doctor
from carlreg.cli import main

pytest.importorskip("SimpleITK")


def states(findings: Any) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def test_the_doctor_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "space", lambda: iter([]))
    monkeypatch.setitem(doctor.CHECKS, "disk", lambda: iter([]))
    assert main(["doctor", "--json"]) == 0
    found = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert found["torch"] == found["ITK"] == found["model carl-base"] == "green"
    assert "red" not in found.values()
    assert main(["doctor"]) == 0
    assert "all is well" in capsys.readouterr().out


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert states(doctor.gpu()) == {"GPU": "note"}
    assert states(doctor.kernels()) == {"kernels": "note"}
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (driver,) = doctor.gpu()
    assert driver.state == "red"
    assert "install the build of PyTorch for your CUDA version" in driver.advice


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as PyTorch describes one. What is computed on it here is the CPU's, so every kernel is right."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA X")
    about = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    (found,) = doctor.gpu()
    assert (found.state, found.text) == ("green", "NVIDIA X, 80 GiB")
    monkeypatch.setattr(doctor.fast, "why_not", lambda device: "Triton is not installed")
    (kernels,) = doctor.kernels()
    assert kernels.state == "note"
    assert "Triton is not installed" in kernels.text
    assert set(states(doctor.compare(torch.device("cpu"))).values()) == {"green"}


def test_a_wrong_or_broken_kernel_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: torch.device) -> torch.Tensor:
        return torch.ones(3, device="cpu") + (0.1 if device.type == "meta" else 0)

    def broken(device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            raise RuntimeError("no kernel image is available")
        return torch.ones(3)

    monkeypatch.setattr(doctor, "OPERATIONS", {"wrong": wrong, "broken": broken})
    first, second = doctor.compare(torch.device("meta"))
    assert first.state == second.state == "red"
    assert "no kernel image" in second.text
    assert "--device cpu" in first.advice


@pytest.mark.gpu
def test_the_kernels_of_this_gpu() -> None:
    found = states(doctor.kernels())
    assert set(found.values()) <= {"green", "note"}, found


def test_a_damaged_model_a_full_disk_and_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "carl-base.safetensors").write_bytes(b"damaged")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  carl-base.safetensors\n", encoding="utf-8")
    monkeypatch.setattr(doctor, "WEIGHTS", tmp_path)
    monkeypatch.setattr(doctor, "available", lambda: ["carl-base"])
    (model,) = doctor.models()
    assert (model.state, model.advice) == ("red", "reinstall the package")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10**6))
    assert states(doctor.space())["disk, this folder"] == "red"
    monkeypatch.setattr(doctor, "PACKAGES", {"no_such_package": (1, 0), "torch": (99, 0)})
    missing, old, _ = doctor.versions()
    assert (missing.state, missing.advice) == ("red", "pip install no_such_package")
    assert "99.0 or later is needed" in old.text
    checks = {"models": doctor.models, "ITK": lambda: (_ for _ in ()).throw(RuntimeError("boom"))}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗ model carl-base: its checksum is not the published one; reinstall the package" in out
    assert "✗ ITK: the check failed: boom" in out
    assert "2 of 2 checks failed" in out


def test_a_tool_that_warps_differently_is_red() -> None:
    fixed, moving, transform = doctor.small_pair()
    warped = doctor.world_transform.apply(transform, moving, fixed).data
    assert doctor._agreement("ITK", warped, warped).state == "green"
    assert doctor._agreement("ITK", warped[::-1], warped).state == "red"


def test_threads_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads, expected in (
        (1, 1, "1 for 1 core"),
        (4, 4, "4 for 4 cores"),
        (16, 1, "1 of 16 cores are used"),
    ):
        monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        (found,) = doctor.threads()
        assert found.text.partition(", ")[0] == expected
        assert found.state == ("note" if cores == 16 else "green")
