"""`carl view`: what the server serves and refuses, and the page in a browser, compared with the transform."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest
from browser import NO_WEBGL, Page, chromium, needs_browser
from conftest import SMALL
from PIL import Image as Picture

sitk = pytest.importorskip("SimpleITK")
from test_report import bend, registration, structures  # noqa: E402  (needs SimpleITK)

import carlreg  # noqa: E402
from carlreg.cli import main  # noqa: E402
from carlreg.errors import InputError  # noqa: E402
from carlreg.files import images, transform_files  # noqa: E402
from carlreg.files.checksums import sha256  # noqa: E402
from carlreg.files.images import Image, from_sitk, map_points  # noqa: E402
from carlreg.files.landmarks import read_correspondences  # noqa: E402
from carlreg.files.orientation import to_closest_ras  # noqa: E402
from carlreg.files.results import EXPECTED_ERROR, Confidence, InputRecord, ResultFolder  # noqa: E402
from carlreg.show import (  # noqa: E402
    report,
    viewer,
)
from carlreg.show.viewer import server as served  # noqa: E402
from carlreg.show.viewer.guide import guided_task  # noqa: E402
from carlreg.show.viewer.jobs import Job, Status, Task  # noqa: E402
from carlreg.show.viewer.scene import nifti  # noqa: E402

FLIP = np.array([-1.0, -1.0, 1.0])


def save(folder: Path, dim: int = 3, ending: str = ".nii.gz") -> Path:
    """A registration of two files with labels, as `carl register` leaves it; the files lie beside its folder."""
    pair = registration(bend if dim == 3 else (lambda points: points + 4.0), dim=dim)
    inputs = {}
    for side, image in (("fixed", pair.fixed), ("moving", pair.moving)):
        path = folder / f"{side}{ending}"
        images.write(image, path)
        voxels = hashlib.sha256(np.ascontiguousarray(images.read(path).data).tobytes()).hexdigest()
        inputs[side] = InputRecord(path=str(path), sha256=sha256(path), sha256_voxels=voxels)
        labels = folder / f"{side}_organs.nii.gz"
        images.write(Image((image.data > 900).astype(np.uint8), image.affine), labels)
        inputs[f"{side}_seg"] = InputRecord(path=str(labels), sha256=sha256(labels))
    pair = dataclasses.replace(pair, record=dataclasses.replace(pair.record, inputs=inputs))
    return pair.save(folder / "out", extra={"report.html": report.page(pair)})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def server(out: Path) -> Iterator[viewer.Server]:
    with running(out) as one:
        yield one


class running:  # noqa: N801  (used like a function)
    """A running server in a thread; NiiVue is only needed for drawing."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        self.server = served.Server(viewer.load_scene(folder), model=model)

    def __enter__(self) -> viewer.Server:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def ask(server: viewer.Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    """Send a request exactly as written; `path` is relative to the secret path, or absolute."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    whole = path if path.startswith("/") else parts.path + path
    connection.putrequest(method, whole, skip_host=True)
    for name, value in {"Host": parts.netloc, **{key.replace("_", "-"): v for key, v in headers.items()}}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


# ---- the server -----------------------------------------------------------------------------------------------------


def test_volumes_are_the_images(server: viewer.Server, out: Path, tmp_path: Path) -> None:
    scene = json.loads(urllib.request.urlopen(server.url + "scene.json").read())
    assert scene["notes"] == []
    assert scene["report"] == server.report_path
    names = {"fixed", "moving", "warped", "fixed_labels", "moving_labels", "warped_labels", "jacobian", "folds"}
    assert set(scene["volumes"]) == names == set(server.scene.volumes)
    for name, source in (("fixed", out.parent / "fixed.nii.gz"), ("warped", out / "warped.nii.gz")):
        (tmp_path / "a.nii").write_bytes(urllib.request.urlopen(f"{server.url}{name}.nii").read())
        theirs, ours = sitk.ReadImage(str(tmp_path / "a.nii")), sitk.ReadImage(str(source))
        assert np.array_equal(sitk.GetArrayFromImage(theirs), sitk.GetArrayFromImage(ours))
        assert np.allclose(theirs.GetOrigin(), ours.GetOrigin())
        assert np.allclose(theirs.GetDirection(), ours.GetDirection())
    (tmp_path / "a.nii").write_bytes(urllib.request.urlopen(f"{server.url}jacobian.nii").read())
    change = from_sitk(sitk.ReadImage(str(tmp_path / "a.nii")))
    transform, at = transform_files.read(out / "transform.h5"), np.array([9, 10, 7])
    here, step = map_points(change.affine, at), 2.0
    columns = [(transform(here + e * step) - transform(here - e * step)) / (2 * step) for e in np.eye(3)]
    assert change.data[tuple(at)] == pytest.approx(np.log2(np.linalg.det(np.transpose(columns))), abs=0.05)


def test_match_is_the_transforms(server: viewer.Server, out: Path) -> None:
    forward, backward = (sitk.ReadTransform(str(out / f"{name}transform.h5")) for name in ("", "inverse_"))
    point = np.array([7.0, -5.0, 3.0])
    words = ",".join(map(str, point))
    found = json.loads(ask(server, f"match.json?point={words}")[1])
    assert found["fixed"]["lps"] == point.tolist()
    assert np.allclose(found["moving"]["lps"], forward.TransformPoint(point.tolist()), atol=1e-3)
    assert np.allclose(found["moving"]["ras"], FLIP * found["moving"]["lps"])
    assert found["inside"] is True
    found = json.loads(ask(server, f"match.json?point={words}&frame=ras")[1])
    assert np.allclose(found["fixed"]["lps"], FLIP * point)
    assert np.allclose(found["moving"]["lps"], forward.TransformPoint((FLIP * point).tolist()), atol=1e-3)
    found = json.loads(ask(server, f"match.json?point={words}&from=moving")[1])
    assert found["moving"]["lps"] == point.tolist()
    assert np.allclose(found["fixed"]["lps"], backward.TransformPoint(point.tolist()), atol=1e-3)
    assert json.loads(ask(server, "match.json?point=900,0,0")[1])["inside"] is False


@pytest.mark.parametrize("query", ["", "point=", "point=1,2", "point=1,2,x", "point=1,2,nan", "point=1,2,3&from=here"])
def test_odd_points_are_refused(server: viewer.Server, query: str) -> None:
    status, body, _ = ask(server, f"match.json?{query}")
    assert status == 400
    assert b"expected" in body


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/report.html",
        "report.html",
        "/wrong/scene.json",
        "../",
        "out",
        "report.json",
        "transform.h5",
        "../report.html",
        "../../fixed.nii.gz",
        "..%2f..%2ffixed.nii.gz",
        "%2e%2e/fixed.nii.gz",
        "/etc/passwd",
        "//etc/passwd",
        "fixed.nii/../../../etc/passwd",
        "scene.py",
        "server.py",
        "fixed",
        "fixed.nii.gz",
        "files/",
        "files/fixed.nii.gz",
        "files/../report.json",
        "vendor/niivue.umd.js",
        "\\..\\fixed.nii.gz",
        "%C3%A9",
        "//[",
    ],
)
def test_paths_outside_of_the_list_are_refused(server: viewer.Server, path: str) -> None:
    status, body, headers = ask(server, path)
    assert status == 404
    assert body.startswith(b"there is nothing here")
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_requests_from_elsewhere_are_refused(server: viewer.Server) -> None:
    host = f"127.0.0.1:{server.server_port}"
    for good in (
        {},
        {"Host": f"localhost:{server.server_port}"},
        {"Origin": f"http://{host}"},
        {"Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "none"},
    ):
        assert ask(server, "scene.json", **good)[0] == 200, good
    for bad in (
        {"Host": "example.org"},
        {"Host": f"example.org:{server.server_port}"},
        {"Host": "127.0.0.1"},
        {"Host": ""},
        {"Origin": "http://example.org"},
        {"Origin": f"https://{host}"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{server.server_port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        status, body, _ = ask(server, "scene.json", **bad)
        assert status == 403, bad
        assert b"volumes" not in body
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"):
        assert ask(server, "scene.json", method)[0] in (405, 501), method
    _, _, headers = ask(server, "")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_only_this_machine_is_served(server: viewer.Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as attempt:
            attempt.settimeout(2)
            assert attempt.connect_ex((address, server.server_port)) != 0, address


def test_inputs_that_are_missing_or_changed_are_not_shown(tmp_path: Path) -> None:
    out = save(tmp_path, ending=".mha")
    assert viewer.load_scene(out).notes == ()
    changed = images.read(tmp_path / "moving.mha")
    images.write(Image(changed.data + 1, changed.affine), tmp_path / "moving.mha", overwrite=True)
    (tmp_path / "fixed.mha").unlink()
    scene = viewer.load_scene(out)
    assert len(scene.notes) == 2
    assert f"the fixed image, '{tmp_path / 'fixed.mha'}', was not found" in scene.notes[0]
    assert f"the moving image, '{tmp_path / 'moving.mha'}', is not shown: report.json has another" in scene.notes[1]
    assert not {"fixed", "moving"} & set(scene.volumes)
    trusted = viewer.load_scene(out, trust=True)
    assert "moving" in trusted.volumes
    assert trusted.notes[1] == f"'{tmp_path / 'moving.mha'}' has changed since the registration"
    (tmp_path / "moving.mha").rename(out / "moving.mha")  # in the folder itself, it is the folder's own
    assert "moving" in viewer.load_scene(out).volumes


def test_a_damaged_report_leaves_the_results(tmp_path: Path) -> None:
    out = save(tmp_path)
    (out / "report.json").write_text("{", encoding="utf-8")
    scene = viewer.load_scene(out)
    assert set(scene.volumes) == {"warped", "jacobian", "folds"}
    assert "report.json is damaged" in scene.notes[0]
    assert scene.describe()["dim"] == 3
    expected = transform_files.read(out / "transform.h5")(np.ones((1, 3)))[0]
    assert np.allclose(scene.match(np.ones(3))["moving"]["lps"], expected)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "\x1b[31m"])
def test_odd_paths_in_the_report_become_notes(tmp_path: Path, path: str) -> None:
    out = save(tmp_path)
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    content["inputs"]["fixed"]["path"] = path
    (out / "report.json").write_text(json.dumps(content), encoding="utf-8")
    scene = viewer.load_scene(out)
    assert set(scene.images) == {"warped", "moving", "fixed_labels", "moving_labels"}
    (note,) = scene.notes
    assert note.startswith("the fixed image")
    assert note.isprintable()


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links")
@pytest.mark.parametrize("name", ["transform.h5", "warped.nii.gz", "report.html"])
def test_results_that_are_links_need_trust(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = save(tmp_path)
    (out / name).rename(tmp_path / name)
    (out / name).symlink_to(tmp_path / name)
    refused(capsys, ["view", out], f"{out / name} is a link to a file outside the folder; give --trust")
    assert viewer.load_scene(out, trust=True).notes == ()


def test_volumes_are_what_niivue_reads(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    for kind in (np.uint8, np.int16, np.int32, np.float32, np.float64, np.int64, np.uint32):
        matrix = np.array([[2.0, 0, 5], [0, 3, 7], [0, 0, 1]])
        path = tmp_path / f"{np.dtype(kind)}.nii"
        path.write_bytes(nifti(Image(np.arange(12).reshape(3, 4).astype(kind), matrix)))
        back = nibabel.load(path)
        assert back.shape == (3, 4, 1)
        assert np.array_equal(np.asanyarray(back.dataobj)[..., 0], np.arange(12).reshape(3, 4))
        assert back.get_data_dtype() in (np.uint8, np.int16, np.int32, np.float32)
        assert np.allclose(FLIP * (back.affine @ [1, 1, 0, 1])[:3], [7, 10, 0])


# ---- the command ----------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], words: list[object], message: str) -> None:
    assert main([str(word) for word in words]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1, err


def test_bad_input(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["view", tmp_path], f"{tmp_path} is not a registration: it has no transform.h5; expected a folder")
    refused(capsys, ["view", tmp_path / "no"], "the folder does not exist; expected a folder of `carl register`")
    refused(capsys, ["view", out / "report.json"], "report.json is not a registration: it is a file; expected a folder")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(capsys, ["view", out, "--port", port], f"port {port} is in use; choose another one, or omit --port")
    assert main(["view", str(out), "--port", "99999"]) == 2


def test_the_command_serves_until_it_is_stopped(out: Path) -> None:
    """The address is printed even without a browser, UTF-8, colours and a terminal width."""
    surroundings = {key: v for key, v in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    surroundings |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "TERM": "dumb", "COLUMNS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "carlreg", "view", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=surroundings,
    )
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        url = re.search(r"http://127\.0\.0\.1:\d+/\S+/", lines[0])
        assert url is not None, lines
        assert lines[1] == "carl: no browser could be opened; open the address yourself, on this machine\n"
        assert b"<canvas" not in urllib.request.urlopen(url[0]).read()
        assert len(urllib.request.urlopen(url[0] + "niivue.js").read()) > 1e6
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == "carl: stopped\n"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


# ---- the package ----------------------------------------------------------------------------------------------------


def test_niivue_is_the_pinned_file() -> None:
    folder = Path(viewer.__file__).parent / "vendor"
    checksum, name = (folder / "SHA256SUMS").read_text(encoding="utf-8").split()
    assert sha256(folder / name) == checksum
    assert "niivue 0.69.0" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_a_wheel_holds_weights_and_viewer(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(__file__).parent.parent
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    for part in ("viewer/vendor/niivue.umd.js", "viewer/vendor/LICENSE", "viewer/page.js", "report/page.js"):
        source = root / "src" / "carlreg" / "show" / part
        assert sizes[f"carlreg/show/{part}"] == source.stat().st_size, part
    assert (
        min(sizes[f"carlreg/model/weights/{name}.safetensors"] for name in ("carl-base", "carl-rot", "carl-2d")) > 1e6
    )
    assert wheel.stat().st_size < 40e6
    assert not [name for name in sizes if name.startswith(("tests/", "docs/"))]


# ---- requests that change something ---------------------------------------------------------------------------------


def post(server: viewer.Server, name: str, body: bytes = b"{}", **changed: str | None) -> tuple[int, bytes]:
    """Send what the page sends, but for the headers that are changed; None leaves one out."""
    parts = urlsplit(server.url)
    headers = {
        "Host": parts.netloc,
        "Origin": f"http://{parts.netloc}",
        "X-Carl-Token": server.token,
        "Content-Length": str(len(body)),
    } | {key.replace("_", "-"): value for key, value in changed.items()}
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    connection.putrequest("POST", parts.path + name, skip_host=True)
    for key, value in headers.items():
        if value is not None:
            connection.putheader(key, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


PAIR = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_only_our_page_changes_something(server: viewer.Server, out: Path) -> None:
    good = json.dumps({"pairs": [PAIR]}).encode()
    before = sorted(out.parent.iterdir())
    for bad in (
        {"X_Carl_Token": None},
        {"X_Carl_Token": "guessed"},
        {"X_Carl_Token": server.secret},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://example.org"},
        {"Host": f"example.org:{server.server_port}"},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        for name in server.posts:
            assert post(server, name, good, **bad)[0] == 403, (name, bad)
    assert sorted(out.parent.iterdir()) == before
    for name in ("scene.json", "warped.nii", "", "job.json", "files/report.json"):
        assert post(server, name)[0] == 405
    assert post(server, "points", b"[]")[0] == 400
    assert post(server, "points", b"{")[0] == 400
    assert post(server, "points", good, Content_Length=None)[0] == 411
    assert post(server, "points", good, Content_Length="99999999")[0] == 413
    for odd in ([], [[1, 2, 3]], [[*PAIR[:5], "6"]], [[*PAIR[:5], True]], [[*PAIR[:5], 1e9]], [PAIR] * 1001, "x", None):
        status, words = post(server, "points", json.dumps({"pairs": odd}).encode())
        assert status == 500
        assert b"expected 1 to 1000 pairs of points" in words
    assert post(server, "show", b'{"result": 7}')[0] == 400
    assert post(server, "show")[0] == 200  # no registration has ended: the result stays
    assert [scene.folder for scene in server.scenes] == [out]
    assert sorted(out.parent.iterdir()) == before


def test_points_are_saved_beside_the_folder(tmp_path: Path) -> None:
    out = save(tmp_path)
    with running(out) as server:
        for name in ("out_points.csv", "out_points2.csv"):  # never over another file
            status, body = post(server, "points", json.dumps({"pairs": [PAIR, PAIR]}).encode())
            assert status == 200
            assert json.loads(body)["path"] == str(tmp_path / name)
    pair = [images.read(tmp_path / f"{side}.nii.gz") for side in ("fixed", "moving")]
    fixed, moving = read_correspondences(tmp_path / "out_points.csv", *pair)
    assert np.allclose(fixed, [PAIR[:3]] * 2)
    assert np.allclose(moving, [PAIR[3:]] * 2)


def test_what_cannot_be_guided_is_refused(tmp_path: Path) -> None:
    out = save(tmp_path)  # by a model of somebody's own
    with running(out) as server:
        status, words = post(server, "guide", json.dumps({"pairs": [PAIR]}).encode())
        assert status == 500
        assert b"the model 'carl-base' is not part of the package; start carl view with --model FILE" in words
    (tmp_path / "moving.nii.gz").unlink()
    with running(out) as server:
        _, words = post(server, "guide", json.dumps({"pairs": [PAIR]}).encode())
        assert b"the moving of this result was not found" in words or b"the moving image" in words
    assert not list(tmp_path.glob("out_*"))


def test_files_can_be_saved(server: viewer.Server, out: Path) -> None:
    for name in ("transform.h5", "report.json", "warped.nii.gz", "report.html"):
        status, body, headers = ask(server, f"files/{name}")
        assert (status, body) == (200, (out / name).read_bytes())
        assert headers["Content-Disposition"] == f'attachment; filename="{name}"'
        assert headers["Content-Type"] == "application/octet-stream"


def test_values_and_labels_at_a_point(server: viewer.Server, out: Path) -> None:
    fixed = images.read(out.parent / "fixed.nii.gz")
    index = np.unravel_index(fixed.data.argmax(), fixed.shape)
    words = ",".join(map(str, map_points(fixed.affine, index)))
    assert json.loads(ask(server, f"at.json?side=fixed&point={words}")[1]) == {
        "value": float(fixed.data.max()),
        "label": "label 1",
    }
    assert json.loads(ask(server, "at.json?side=fixed&point=900,0,0")[1]) == {"value": None, "label": None}
    assert ask(server, "at.json?side=fixed_labels&point=0,0,0")[0] == 400


# ---- in a browser ---------------------------------------------------------------------------------------------------


def shown(page: Any) -> np.ndarray:
    """The fixed and the moving point (2, 3) that the page names, LPS."""
    words = page.get("document.getElementById('where').textContent")
    return np.array([float(n) for n in re.findall(r"-?[0-9]+\.[0-9]", words)]).reshape(2, 3) * FLIP


def crosshair(page: Any, side: str) -> np.ndarray:
    """The point at which NiiVue draws its crosshair, LPS."""
    return (
        np.array(page.get(f"Array.from(panels.{side}.frac2mm(panels.{side}.scene.crosshairPos, 0, true))"))[:3] * FLIP
    )


@pytest.mark.browser
@needs_browser
def test_a_click_shows_the_matching_point(tab: Page, server: viewer.Server, out: Path) -> None:
    fixed = to_closest_ras(images.read(out.parent / "fixed.nii.gz"))
    transform, inverse = (transform_files.read(out / f"{name}transform.h5") for name in ("", "inverse_"))
    page = tab
    page.open(server.url, width=900, height=700)
    page.wait("document.body.dataset.ready")
    assert page.get("document.body.dataset.ready") == "yes"
    assert page.get("document.querySelectorAll('canvas:not(.over)').length") == 3
    assert page.get("Object.values(panels).every((p) => p.volumes.length === 1 && p.volumes[0].dims[0] >= 3)")

    # The axial tile: radiological, front at the top; its edges are the outer voxels' edges.
    tile = page.get("Array.from(panels.fixed.screenSlices.find((s) => s.axCorSag === 0).leftTopWidthHeight)")
    scale = page.get("panels.fixed.uiData.dpr")
    left, top, _, _ = page.box("#panels figure canvas")
    voxel = np.array([5, 8])
    across = 1 - (voxel + 0.5) / fixed.shape[:2]
    x, y = ((tile[n] + across[n] * tile[2 + n]) / scale for n in (0, 1))
    turn = page.get("document.body.dataset.shown")
    page.click(left + x, top + y)
    page.wait(f"document.body.dataset.shown !== '{turn}'")
    page.settle()
    here, there = shown(page)
    index = map_points(np.linalg.inv(fixed.affine), here)
    assert np.abs(index[:2] - voxel).max() < 0.3, index  # the right voxel
    assert np.abs(there - transform(here[None])[0]).max() < 0.2, "rounded to 0.1 mm twice"
    assert np.abs(crosshair(page, "fixed") - here).max() < 0.1
    assert np.abs(crosshair(page, "warped") - here).max() < 0.1
    assert np.abs(crosshair(page, "moving") - there).max() < 0.1

    # And from the moving image, by the inverse.
    left, top, width, height = page.box("#panels figure:last-child canvas")
    turn = page.get("document.body.dataset.shown")
    page.click(left + 0.45 * width, top + 0.15 * height)
    page.wait(f"document.body.dataset.shown !== '{turn}'")
    here, there = shown(page)
    assert np.abs(here - inverse(there[None])[0]).max() < 0.2
    assert np.abs(crosshair(page, "fixed") - here).max() < 0.1

    bare = page.png()
    for choice, count in (("labels", [2, 2, 2]), ("jacobian", [3, 3, 1])):
        page.get(f"(byId('overlay').value = '{choice}', changeOverlay())")
        assert page.get("SIDES.map((side) => panels[side].volumes.length)") == count
        page.settle()
        assert page.png() != bare
    page.get("(byId('overlay').value = 'none', changeOverlay())")
    page.settle()
    own = f"http://127.0.0.1:{server.server_port}/"
    assert [url for url in page.requests if not url.startswith((own, "data:", f"blob:{own}"))] == []
    assert page.complaints == []
    page.open(urljoin(server.url, server.report_path))
    page.wait("document.body.dataset.ready")
    assert page.complaints == []


@pytest.mark.browser
@needs_browser
def test_two_dimensions(tab: Page, tmp_path: Path) -> None:
    out, page = save(tmp_path, dim=2), tab
    with running(out) as server:
        page.open(server.url)
        page.wait("document.body.dataset.ready")
        assert page.get("document.body.dataset.ready") == "yes"
        assert page.complaints == []
        left, top, width, height = page.box("canvas")
        turn = page.get("document.body.dataset.shown")
        page.click(left + width / 3, top + height / 2)
        page.wait(f"document.body.dataset.shown !== '{turn}'")
        words = page.get("document.getElementById('where').textContent")
        x, y, u, v = (float(n) for n in re.findall(r"-?[0-9]+\.[0-9]", words))
        assert (u - x, v - y) == pytest.approx((-4, -4), abs=0.11)  # RAS of a shift by 4 mm, 4 mm in LPS


@pytest.mark.browser
@needs_browser
def test_without_webgl_the_page_says_so(server: viewer.Server) -> None:
    with chromium(*NO_WEBGL) as page:
        page.open(server.url)
        page.wait("document.body.dataset.ready")
        assert "has no WebGL 2" in page.get("document.getElementById('notes').textContent")
        assert page.get("document.getElementById('report').hidden") is False
        assert page.complaints == []


def screen(page: Any) -> np.ndarray:
    return np.asarray(Picture.open(io.BytesIO(page.png())).convert("RGB")).astype(int)


def tile(page: Any, side: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of the axial picture of a panel in the window."""
    left, top = page.get(f"(({{left, top}}) => [left, top])(panels.{side}.canvas.getBoundingClientRect())")
    picture = f"panels.{side}.screenSlices.find((one) => one.axCorSag === 0).leftTopWidthHeight"
    x, y, width, height = page.get(f"Array.from({picture}, (n) => n / panels.{side}.uiData.dpr)")
    return left + x, top + y, width, height


def opened(page: Any, server: viewer.Server, width: int = 900, height: int = 620) -> None:
    page.open(server.url, width=width, height=height)
    page.wait("document.body.dataset.ready")
    assert page.get("document.body.dataset.ready") == "yes"
    page.settle()


@pytest.mark.browser
@needs_browser
def test_the_background_of_138_labels_is_not_painted(tab: Page, tmp_path: Path) -> None:
    pair = structures()
    verdict = Confidence(verdict="doubtful", expected_error_mm=3.25, reasons=("the organs overlap little",))
    pair = dataclasses.replace(pair, record=dataclasses.replace(pair.record, confidence=verdict))
    out = pair.save(tmp_path / "out")
    for side in ("fixed", "moving"):
        images.write(getattr(pair, side), out / f"{side}.nii.gz")
        images.write(getattr(pair, f"{side}_labels"), out / f"{side}_labels.nii.gz")
    with running(out) as server:
        opened(tab, server)
        words = tab.get("byId('confidence').textContent")
        assert words == "Doubtful: look before you use it · expected error 3.3 mm · the organs overlap little"
        bare = screen(tab)
        tab.get("(byId('opacity').value = 100, byId('overlay').value = 'labels', changeOverlay())")
        tab.settle()
        painted = np.abs(screen(tab) - bare).max(axis=-1) > 8
        left, top, width, height = tile(tab, "fixed")

        def part(low: float, high: float) -> np.ndarray:
            rows, columns = (slice(round(a + low * n), round(a + high * n)) for a, n in ((top, height), (left, width)))
            return painted[rows, columns]

        assert part(0.02, 0.14).mean() == 0  # background: the labels fill the inner half of the image
        assert part(0.3, 0.45).mean() > 0.95
        # The name of the label under the mouse.
        tab.mouse("mouseMoved", left + 0.35 * width, top + 0.4 * height, "none")
        tab.wait("byId('under').textContent.includes('structure')")
        tab.mouse("mouseMoved", left + 0.1 * width, top + 0.1 * height, "none")
        tab.wait("byId('under').textContent.startsWith('fixed: ') && !byId('under').textContent.includes('structure')")
        assert tab.complaints == []


@pytest.mark.browser
@needs_browser
def test_panels_mixtures_and_levels(tab: Page, server: viewer.Server) -> None:
    opened(tab, server)
    sides = "Object.values(panels).map(({figure}) => [figure.clientWidth, figure.clientHeight])"
    widths, heights = zip(*tab.get(sides), strict=True)
    assert sum(widths) > 880  # the panels fill the window
    assert min(heights) > 450
    tab.mouse("mouseMoved", 450, 300, "none")
    tab.wait("byId('under').textContent")
    assert list(map(list, zip(widths, heights, strict=True))) == tab.get(sides)  # what is under the mouse moves nothing
    box = "(({left, top, width, height}) => [left, top, width, height])(panels.warped.canvas.getBoundingClientRect())"
    x, y, width, height = (round(n) for n in tab.get(box))

    def warped() -> np.ndarray:
        tab.settle()
        return screen(tab)[y + 30 : y + height, x : x + width]

    plain = warped()
    assert (plain[..., 0] == plain[..., 1])[plain[..., 1] > 0].mean() > 0.9  # grey, but for the crosshair
    pictures = {"warped": plain}
    for mode in ("blend", "checkerboard", "difference"):
        tab.choose("#middle", mode)
        pictures[mode] = warped()
    assert all(np.abs(pictures[a] - pictures[b]).max() > 50 for a in pictures for b in pictures if a < b)
    line = (np.ptp(plain, axis=-1) > 100) & (plain[..., 0] > 250)  # the crosshair, which both images have
    assert line.sum() > 100
    assert np.abs(pictures["blend"] - plain)[line].max() < 10
    assert pictures["difference"][line].max() > 200  # the crosshair does not vanish
    tab.choose("#middle", "flicker")
    tab.wait("panels.warped.caption.textContent === 'flicker: fixed'")
    tab.choose("#middle", "warped")
    assert np.array_equal(warped(), plain)
    before = tab.get("Object.values(panels).map((p) => [p.volumes[0].cal_min, p.volumes[0].cal_max])")
    tab.get("((one) => { one.value = Number(one.value) / 2; one.onchange(); })(byId('width'))")
    after = tab.get("Object.values(panels).map((p) => [p.volumes[0].cal_min, p.volumes[0].cal_max])")
    for (low, high), (new_low, new_high) in zip(before, after, strict=True):
        assert new_high - new_low == pytest.approx((high - low) / 2, rel=0.01)
        assert new_high + new_low == pytest.approx(high + low, rel=0.01, abs=0.5)
    assert np.abs(warped() - plain).max() > 20
    tab.key("Escape")
    assert np.array_equal(warped(), plain)

    # A drag with the right button: 100 pixels down is a third of the width, 200 to the right is a factor of e.
    left, top, wide, high = tile(tab, "fixed")
    here, point = (left + wide / 2, top + high / 2), shown(tab)
    there = here[0] - 60, here[1] + 30
    for kind, place, buttons in (("mousePressed", here, 2), ("mouseMoved", there, 2), ("mouseReleased", there, 0)):
        tab.mouse(kind, *place, button="right", buttons=buttons, clickCount=1)
    tab.settle()
    values = tab.get("Object.values(panels).map((p) => [p.volumes[0].cal_min, p.volumes[0].cal_max])")
    for (low, high), (new_low, new_high) in zip(before, values, strict=True):
        assert new_high - new_low == pytest.approx((high - low) * np.exp(-0.3), rel=0.01)
        assert (new_high + new_low) / 2 == pytest.approx((high + low) / 2 + (high - low) / 10, rel=0.01)
    assert tab.get("Number(byId('width').value)") == pytest.approx(values[0][1] - values[0][0], rel=0.01)
    assert np.array_equal(shown(tab), point)  # the place that is shown stays
    tab.key("Escape")
    assert np.array_equal(warped(), plain)

    point = shown(tab)
    tab.get("byId('frame').click()")
    assert tab.get("byId('frame').textContent") == "LPS"
    assert np.array_equal(shown(tab) * FLIP, point)
    for key, by in (("ArrowUp", 1), ("ArrowDown", -1)):
        here = crosshair(tab, "fixed")
        left, top, wide, high = tile(tab, "fixed")
        tab.mouse("mouseMoved", left + wide / 2, top + high / 2, "none")
        turn = tab.get("document.body.dataset.shown")
        tab.key(key)
        tab.wait(f"document.body.dataset.shown !== '{turn}'")
        assert np.sign((crosshair(tab, "fixed") - here)[2]) == by
    assert tab.complaints == []


@pytest.mark.browser
@needs_browser
def test_crosshairs_are_thin_from_the_start(tab: Page, server: viewer.Server) -> None:
    """NiiVue keeps the lines of its crosshair, a millimetre wide, until the crosshair moves."""
    opened(tab, server, 1400, 900)
    for side in ("fixed", "warped"):
        left, top, width, height = tile(tab, side)
        assert height / (tab.get("sizeOf(panels.fixed)")[1]) > 4  # pixels of a millimetre
        column = screen(tab)[round(top) : round(top + height), round(left + 0.25 * width)]
        assert 1 <= (column[:, 0] - column[:, 2] > 60).sum() <= 3  # yellow


@pytest.mark.browser
@needs_browser
def test_a_stopped_program_is_noticed_once(tab: Page, out: Path) -> None:
    with running(out) as one:
        opened(tab, one)
        left, top, width, height = tile(tab, "fixed")
    for part in (0.2, 0.4, 0.6):
        tab.mouse("mouseMoved", left + part * width, top + part * height, "none")
        tab.click(left + part * width, top + part * height)
        tab.settle()
    tab.wait("document.querySelector('.note')")
    tab.settle()
    assert tab.get("byId('notes').innerText") == "The program does not answer. Is carl still running?"


@pytest.mark.browser
@needs_browser
def test_planes_are_arranged_alike_in_all_panels(tab: Page, tmp_path: Path) -> None:
    """A flat scan and a tall one would each be largest in another arrangement."""
    pair = structures()
    pair = dataclasses.replace(pair, record=dataclasses.replace(pair.record, inputs={}))
    out = pair.save(tmp_path / "out")
    images.write(pair.fixed, out / "fixed.nii.gz")
    images.write(Image(np.concatenate([pair.moving.data] * 2, axis=2), pair.moving.affine), out / "moving.nii.gz")
    with running(out) as server:
        for width, height in ((1400, 900), (390, 844)):
            opened(tab, server, width, height)
            layouts = tab.get("Object.values(panels).map((panel) => panel.opts.multiplanarLayout)")
            assert len(layouts) == 3
            assert len(set(layouts)) == 1, (width, height, layouts)
            for side in ("fixed", "moving"):
                x, y, w, h = tile(tab, side)
                left, top, wide, high = tab.get(
                    f"(({{left, top, width, height}}) => [left, top, width, height])"
                    f"(panels.{side}.canvas.getBoundingClientRect())"
                )
                assert x >= left - 1
                assert y >= top - 1
                assert x + w <= left + wide + 1
                assert y + h <= top + high + 1
        assert tab.complaints == []


def scales(page: Page) -> dict[str, list[float]]:
    """By panel, pixels of a millimetre across and down in every plane."""
    scale = "(s) => [0, 1].map((n) => Math.abs(s.leftTopWidthHeight[2 + n] / s.fovMM[n]) / p.uiData.dpr)"
    return page.get(f"Object.fromEntries(Object.entries(panels).map(([k, p]) => [k, p.screenSlices.flatMap({scale})]))")


@pytest.mark.browser
@needs_browser
def test_images_have_the_same_scale_in_all_panels(tab: Page, tmp_path: Path) -> None:
    """Images of different sizes, in every arrangement, before and after the window is resized."""
    pair = structures()
    pair = dataclasses.replace(pair, record=dataclasses.replace(pair.record, inputs={}))
    out = pair.save(tmp_path / "out")
    images.write(pair.fixed, out / "fixed.nii.gz")
    larger = np.pad(pair.moving.data, ((3, 3), (0, 9), (1, 0)))
    images.write(Image(larger, pair.moving.affine), out / "moving.nii.gz")
    with running(out) as server:
        opened(tab, server, 1400, 900)
        for width, height in ((1400, 900), (1000, 500), (390, 844), (1400, 900)):
            tab.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            tab.settle()
            for planes in ("3", "0", "1", "2"):
                tab.choose("#planes", planes)
                tab.settle()
                found = scales(tab)
                assert set(found) == {"fixed", "warped", "moving"}
                numbers = np.concatenate(list(found.values()))
                assert len(numbers) == (18 if planes == "3" else 6)
                assert numbers == pytest.approx(np.full(len(numbers), numbers[0]), rel=5e-3), (width, planes, found)
                # The larger image fills its panel.
                for side in ("Width", "Height"):
                    assert tab.get(f"panels.moving.figure.client{side} - panels.moving.box.client{side}") <= 2
        assert tab.complaints == []


@pytest.mark.browser
@needs_browser
def test_the_expected_error_is_an_overlay(tab: Page, tmp_path: Path) -> None:
    out = save(tmp_path)
    fixed = images.read(tmp_path / "fixed.nii.gz")
    errors = np.linspace(0, 6, fixed.data.size, dtype=np.float32).reshape(fixed.shape)
    images.write(Image(errors, fixed.affine), out / EXPECTED_ERROR)
    with running(out) as server:
        index = (10, 20, 7)
        point = ",".join(map(str, map_points(fixed.affine, index)))
        found = json.loads(ask(server, f"at.json?side=fixed&point={point}")[1])
        assert found["expected_error_mm"] == pytest.approx(float(errors[index]), abs=1e-3)
        assert "expected_error_mm" not in json.loads(ask(server, f"at.json?side=moving&point={point}")[1])
        opened(tab, server)
        assert tab.get("Array.from(byId('overlay').options, (o) => o.value)")[-1] == "error"
        plain = screen(tab)
        tab.choose("#overlay", "error")
        tab.wait("panels.fixed.volumes.length === 2 && panels.warped.volumes.length === 2")
        tab.settle()
        assert tab.get("panels.moving.volumes.length") == 1
        shown = tab.get(
            "[panels.fixed.volumes[1].colormap, panels.fixed.volumes[1].cal_min, panels.fixed.volumes[1].cal_max]"
        )
        assert shown == ["inferno", 0, 6]
        assert "yellow ≥ 6 mm" in tab.get("byId('sides').textContent")
        coloured = np.abs(screen(tab)[..., 0] - screen(tab)[..., 2]) > 30
        assert coloured.mean() > (np.abs(plain[..., 0] - plain[..., 2]) > 30).mean() + 0.02
        tab.choose("#overlay", "none")
        tab.wait("panels.fixed.volumes.length === 1")
    assert tab.complaints == []
    (out / EXPECTED_ERROR).unlink()
    assert "expected_error" not in viewer.load_scene(out).describe()["volumes"]


def network(folder: Path) -> Path:
    path = folder / "net.safetensors"
    carlreg.save(carlreg.gradicon(3, 2, **SMALL), path, metadata={"grid": "16 16 16"})
    return path


def scans(folder: Path) -> tuple[Path, Path]:
    """Two small images of waves, the second shifted."""
    index = np.indices((22, 24, 20)).astype(np.float32)
    paths = tuple(folder / f"{side}.nii" for side in ("fixed", "moving"))
    for n, path in enumerate(paths):
        data = np.sin((index[0] - n) / 3) + np.cos(index[1] / 4) * np.sin(index[2] / 3)
        images.write(Image(data, np.diag([2.0, 2, 2, 1])), path)
    return paths


def test_a_correction_keeps_rigid_regions(tmp_path: Path) -> None:
    """A tumour that may not bend does not bend because somebody corrected a point elsewhere."""
    out, region = save(tmp_path), tmp_path / "tumour.nii.gz"
    images.write(Image(np.ones((4, 4, 4), np.uint8), np.eye(4)), region)
    folder = ResultFolder(out)
    report = folder.read_report()
    inputs = {**report.inputs, "rigid_mask": InputRecord(path=str(region), sha256=sha256(region))}
    (out / "report.json").write_text(json.dumps(dataclasses.replace(report, inputs=inputs).to_json()))
    task = guided_task(viewer.load_scene(out), [PAIR], "none")
    assert task.inputs["rigid_mask"] == str(region)
    region.unlink()
    with pytest.raises(InputError, match="the rigid mask of this result was not found"):
        guided_task(viewer.load_scene(out), [PAIR], "none")


def test_recorded_points_are_recalled_if_they_are_points(tmp_path: Path) -> None:
    out = save(tmp_path)
    report = ResultFolder(out).read_report().to_json()
    for points, known in (([PAIR], [PAIR]), ([PAIR[:4]], []), ([[*PAIR[:5], 10**400]], []), ([["1"] * 6], []), (3, [])):
        (out / "report.json").write_text(json.dumps({**report, "guide": points}))
        scene = viewer.load_scene(out)
        assert scene.guide() == known
        assert any("is damaged" in note for note in scene.notes) == (not known and points != [PAIR[:4]])


@pytest.mark.browser
@needs_browser
def test_points_guide_a_new_registration(tab: Page, tmp_path: Path) -> None:
    """From clicks in both images to a result in a new folder, which the page then shows."""
    (fixed, moving), model = scans(tmp_path), network(tmp_path)
    words: list[object] = ["register", "-f", fixed, "-m", moving, "--model", model, "-o", tmp_path / "out"]
    assert main([str(word) for word in (*words, "--io-iterations", 2, "--quiet")]) == 0
    old = {path.name: sha256(path) for path in (tmp_path / "out").iterdir()}
    with running(tmp_path / "out", str(model)) as server:
        opened(tab, server)
        tab.get("byId('correct').click()")
        tab.settle()

        def click(side: str, across: float, down: float) -> None:
            left, top, width, height = tile(tab, side)
            turn = tab.get("document.body.dataset.shown")
            tab.click(left + across * width, top + down * height)
            tab.wait(f"document.body.dataset.shown !== '{turn}'")
            tab.settle()

        wanted = []
        for across, down in ((0.4, 0.4), (0.6, 0.55)):
            click("fixed", across, down)
            here = shown(tab)[0]
            click("moving", across + 0.1, down)
            assert np.array_equal(shown(tab)[0], here)  # the fixed point stays
            count = tab.get("pairs.length")
            tab.get("byId('add').click()")
            tab.wait(f"pairs.length === {count + 1}")
            wanted.append(shown(tab))
        assert tab.get("document.querySelectorAll('#pairs li').length") == 2
        tab.get("byId('add').click()")
        tab.wait("pairs.length === 3")
        tab.get("document.querySelectorAll('#pairs button')[2].click()")
        assert tab.get("document.querySelectorAll('#pairs li').length") == 2
        listed = []
        for _ in range(2):
            tab.get("byId('frame').click()")
            listed.append(str(tab.get("document.querySelector('#pairs span').textContent")))
        assert sorted(text.split(" mm ")[1][:3] for text in listed) == ["LPS", "RAS"]
        assert listed[0].split(" mm ")[0] != listed[1].split(" mm ")[0]

        (_, low, _, high), (_, below, _, _) = (tab.box(f"#{name}") for name in ("save", "again"))
        assert below == low or below >= low + high + 4  # buttons beside or below each other do not touch
        tab.get("byId('save').click()")
        tab.wait("byId('saved').textContent.includes('out_points.csv')")
        rows = np.loadtxt(tmp_path / "out_points.csv", delimiter=",", skiprows=1).reshape(2, 2, 3)
        assert np.abs(rows - np.array(wanted)).max() < 0.06  # the page shows one decimal

        tab.get("byId('again').click()")
        tab.wait("scene.results.length === 2 && document.body.dataset.ready === 'yes'", 120)
        assert tab.get("document.title") == "out_guided · carl view"
        assert server.scene.folder == tmp_path / "out_guided"
        metrics = json.loads((tmp_path / "out_guided" / "report.json").read_text())["metrics"]
        assert metrics["guide_after_mm"] < metrics["guide_before_mm"]
        assert (tmp_path / "out_guided" / "report.html").is_file()
        assert {path.name: sha256(path) for path in (tmp_path / "out").iterdir()} == old
        assert tab.get("document.querySelectorAll('#pairs li').length") == 2  # a further correction keeps them
        kept = np.array(tab.get("sent().pairs")).reshape(2, 2, 3)
        assert np.abs(kept - rows).max() < 1e-3
        tab.choose("#result", "0")
        tab.wait("document.title === 'out · carl view' && document.body.dataset.ready === 'yes'")
        assert tab.get("pairs.length") == 0
        assert tab.complaints == []


@dataclasses.dataclass
class StandIn:
    """A job that is as far as the test says."""

    task: Task
    status: Status

    def describe(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.status), "seconds": 3}

    def cancel(self) -> None: ...


@pytest.mark.browser
@needs_browser
def test_a_correction_is_followed_after_a_reload(tab: Page, tmp_path: Path) -> None:
    out, other, guided = save(tmp_path), tmp_path / "other", tmp_path / "out_guided"
    for copy in (other, guided):
        shutil.copytree(out, copy)
    with running(out) as server:
        server.scenes.append(viewer.load_scene(other))
        opened(tab, server)
        assert tab.get("byId('guide').hidden") is True
        task = Task({"guide": "points.csv"}, str(guided))
        server.job = job = StandIn(task, Status("running", "optimisation", 60))  # type: ignore[assignment]
        tab.choose("#result", "0")
        tab.wait("document.title === 'out · carl view' && document.body.dataset.ready === 'yes'")
        assert tab.get("byId('guide').hidden || byId('job').hidden") is False
        assert tab.get("byId('correct').ariaExpanded") == "true"
        assert tab.get("byId('phase').textContent") == "optimisation, 60 %, 3 s"
        job.status = Status("done")
        tab.wait("document.title === 'out_guided · carl view' && document.body.dataset.ready === 'yes'")
        assert tab.get("byId('guide').hidden") is True
        assert tab.complaints == []
        server.job = StandIn(task, Status("failed", message="the scans have no common part"))  # type: ignore[assignment]
        opened(tab, server)
        assert tab.get("byId('notes').textContent") == "the scans have no common part"


def test_a_registration_can_be_cancelled_and_fails_in_one_line(tmp_path: Path) -> None:
    (fixed, moving), model = scans(tmp_path), network(tmp_path)
    inputs = {"fixed": str(fixed), "moving": str(moving)}
    job = Job(Task(inputs, str(tmp_path / "out"), str(model), {"io_iterations": 100_000}))
    deadline = time.monotonic() + 60
    while job.status.phase != "optimisation" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 0 < job.status.percent < 100
    job.cancel()
    assert job.status.state == "cancelled"
    assert not (tmp_path / "out").exists()
    job = Job(Task(inputs | {"fixed": str(tmp_path / "no.nii")}, str(tmp_path / "out"), str(model)))
    while job.status.state == "running" and time.monotonic() < deadline + 60:
        time.sleep(0.1)
    assert job.status.state == "failed"
    assert "no.nii" in job.status.message
    assert len(job.status.message.splitlines()) == 1
    job.cancel()
