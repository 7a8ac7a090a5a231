"""What the command line prints when something fails: one line for users, a traceback for bugs."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from carlreg.cli import main

COMMANDS = [
    ["register"],
    ["warp"],
    ["warp-points"],
    ["jacobian"],
    ["convert"],
    ["info"],
    ["evaluate"],
    ["explain"],
    ["view"],
    ["demo"],
    ["train"],
    *(["models", name] for name in ("list", "show", "verify", "licence", "import")),
]


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `carl models licence` fail with this error."""

    def fail(*_: Any, err: bool = False, echo: Any = typer.echo, **__: Any) -> None:
        if not err:
            raise error
        echo(*_, err=err, **__)

    monkeypatch.setattr(typer, "echo", fail)


@pytest.mark.parametrize(
    "error", [TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError]
)
def test_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    failing(monkeypatch, error("inner detail"))
    try:
        code = main(["models", "licence"])
    except error:  # as Python would print it
        pytest.fail("the error left main")
    err = capsys.readouterr().err
    assert code == 1
    assert "Traceback" in err, err
    assert "inner detail" in err
    assert "please report it" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "a.nii"),
            "a.nii cannot be written: the disk is full; free some space, then run the same command again",
        ),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (MemoryError("Unable to allocate 9 GiB"), "out of memory: Unable to allocate 9 GiB"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory:\nyou tried 9 bytes."),
            "out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.",
        ),
    ],
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    failing(monkeypatch, error)
    assert main(["models", "licence"]) == 1
    assert capsys.readouterr().err == f"carl: {line}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "carlreg", "models", "licence"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    assert done.returncode == 1
    assert done.stderr == "carl: the disk is full; free some space, then run the same command again\n"


def test_verbose_adds_the_traceback_of_a_users_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert main(["info", missing]) == 1
    short = capsys.readouterr().err
    assert "Traceback" not in short
    assert main(["info", missing, "--verbose"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(short)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_can_be_quiet_or_verbose(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {"--quiet", "-q", "--verbose", "-v"} <= set(words)
    assert main([*command, "--quiet", "--verbose"]) == 2


@pytest.mark.parametrize("missing", ["typer", "click"])
def test_a_missing_package_is_one_line(tmp_path: Path, missing: str) -> None:
    """Before anything can be parsed: typer itself, or a package that it needs."""
    (tmp_path / "typer").mkdir()
    stub = f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')"
    (tmp_path / "typer" / "__init__.py").write_text(stub, encoding="utf-8")
    code = "import sys; sys.path.insert(0, sys.argv.pop()); from carlreg.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"carl: {missing} is missing or damaged: No module named '{missing}'; install it again: "
        f"pip install --force-reinstall {missing}\n"
    )


def test_a_package_that_is_missing_later_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ImportError("cannot import name 'open_code' from 'PIL'", name="PIL.Image"))
    assert main(["models", "licence"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("carl: pillow is missing or damaged: cannot import name")
    assert "Traceback" not in err
    failing(monkeypatch, ImportError("cannot import name 'x'", name="carlreg.files"))  # a bug
    main(["models", "licence"])
    assert "Traceback" in capsys.readouterr().err


def test_wrong_choices_are_named_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["register", "--transform", "curved"]) == 2
    err = capsys.readouterr().err
    assert "Invalid value for '--transform': 'curved' is not one of 'deformable', 'affine', 'rigid'." in err
