"""`carl app`: what it accepts and refuses, and a registration from two dropped files to the viewer."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from browser import Page, needs_browser

sitk = pytest.importorskip("SimpleITK")
from test_dicom import study  # noqa: E402, F401  (a fixture)
from test_view import StandIn, ask, network, post, save, scans  # noqa: E402  (needs SimpleITK)

from carlreg.errors import CarlError  # noqa: E402
from carlreg.files import images  # noqa: E402
from carlreg.files.images import Image  # noqa: E402
from carlreg.show import app, viewer  # noqa: E402
from carlreg.show.viewer import jobs  # noqa: E402


@contextmanager
def running(**options: Any) -> Iterator[app.App]:
    with app.serve(**options) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server() -> Iterator[app.App]:
    with running() as one:
        yield one


def upload(server: app.App, name: str, content: bytes, side: str = "fixed", first: int = 1) -> tuple[int, bytes]:
    return post(server, f"upload?side={side}&first={first}&name={name}", content)


def refused(server: app.App, value: dict[str, Any]) -> str:
    status, words = post(server, "start", json.dumps(value).encode())
    assert status >= 400
    text = words.decode().strip()
    assert len(text.splitlines()) == 1
    return text


def test_uploads_are_private_and_removed_at_the_end() -> None:
    with running() as server:
        assert upload(server, "scan.nii.gz", b"123")[0] == 200
        (path,) = server.uploads("fixed")
        assert path.read_bytes() == b"123"
        if os.name != "nt":
            assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        assert upload(server, "other.nii", b"4")[0] == 200  # replaces the first
        assert [one.name for one in server.uploads("fixed")] == ["other.nii"]
        assert upload(server, "more.nii", b"5", first=0)[0] == 200
        assert server.source("fixed", "") == str(server.folder / "fixed")  # several files: a folder, such as DICOM
        upload(server, "scan.mhd", b"header", side="moving")
        upload(server, "scan.raw", b"voxels", side="moving", first=0)
        assert server.source("moving", "") == str(server.folder / "moving" / "scan.mhd")
    assert not server.folder.exists()


@pytest.mark.parametrize(
    "name", ["..%2f..%2fevil.nii", "%2fetc%2fpasswd", "..", "", ".hidden", "a%00b.nii", "x" * 300 + ".nii"]
)
def test_names_of_uploads_stay_in_their_folder(server: app.App, name: str) -> None:
    assert upload(server, name, b"1")[0] == 200
    (path,) = server.uploads("fixed")
    assert path.parent == server.folder / "fixed"
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", path.name)
    assert [one.name for one in server.folder.iterdir()] == ["fixed"]


def test_uploads_that_do_not_fit_are_refused(server: app.App, monkeypatch: pytest.MonkeyPatch) -> None:
    assert upload(server, "a.nii", b"1", side="elsewhere")[0] == 400
    assert post(server, "upload?name=a.nii", b"1")[0] == 400
    monkeypatch.setattr(app.shutil, "disk_usage", lambda _: type("Usage", (), {"free": app.RESERVE + 2})())
    status, words = upload(server, "a.nii", b"123")
    assert status == 413
    assert b"more than the disk has room for; type its path instead" in words
    assert server.uploads("fixed") == []
    assert upload(server, "a.nii", b"12")[0] == 200


def test_only_the_page_may_start_something(server: app.App, tmp_path: Path) -> None:
    fixed, moving = scans(tmp_path)
    body = json.dumps({"paths": {"fixed": str(fixed), "moving": str(moving)}}).encode()
    for bad in ({"X_Carl_Token": None}, {"X_Carl_Token": "no"}, {"Origin": None}, {"Origin": "http://example.org"}):
        assert post(server, "start", body, **bad)[0] == 403
        assert post(server, "upload?side=fixed&name=a.nii", b"1", **bad)[0] == 403
        assert post(server, "remove?side=fixed", **bad)[0] == 403
    assert server.job is None
    assert server.server_address[0] == "127.0.0.1"
    for path in ("scene.json", "view.json", "warped.nii", "files/report.json", "match.json?point=1,2,3"):
        status, words, _ = ask(server, path)
        assert (status, words) in ((404, b"there is no result yet\n"), (404, b"there is nothing here\n"))


def test_files_dropped_by_mistake_can_be_removed(server: app.App, tmp_path: Path) -> None:
    both = dict(zip(("fixed", "moving"), map(str, scans(tmp_path)), strict=True))
    upload(server, "labels.nii", b"1", side="fixed_seg")
    assert "fixed_seg was given without moving_seg" in refused(server, {"paths": both})
    for bad in ("remove", "remove?side=", "remove?side=..", "remove?side=results"):
        assert post(server, bad)[0] == 400
    assert [path.name for path in server.uploads("fixed_seg")] == ["labels.nii"]
    for _ in range(2):  # it does not matter if there are none
        assert post(server, "remove?side=fixed_seg")[0] == 200
        assert server.uploads("fixed_seg") == []
    assert "fixed_seg" not in server.task({"paths": both}).inputs


@pytest.mark.parametrize("name", ["my scan", "Müller (1), head + neck"])
def test_a_header_finds_its_voxels(server: app.App, tmp_path: Path, name: str) -> None:
    data = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    sitk.WriteImage(sitk.GetImageFromArray(data), tmp_path / f"{name}.mhd")
    for first, ending in ((1, "mhd"), (0, "raw")):
        file = tmp_path / f"{name}.{ending}"
        assert upload(server, quote(file.name), file.read_bytes(), first=first)[0] == 200
    assert np.array_equal(images.read(str(server.source("fixed", ""))).data, data.T)


def test_images_that_hold_more_than_one(server: app.App, tmp_path: Path) -> None:
    """4-D, in colour, with NaN: each message names a field of the page, which takes what the command line does."""
    fixed, moving = scans(tmp_path)
    scan = sitk.ReadImage(fixed)
    sitk.WriteImage(sitk.JoinSeries([scan, scan]), fixed)
    voxels = np.repeat(sitk.GetArrayFromImage(sitk.ReadImage(moving))[..., None], 3, axis=-1)
    voxels[0, 0, 0] = np.nan
    sitk.WriteImage(sitk.GetImageFromArray(voxels, isVector=True), tmp_path / "moving.mha")
    value: dict[str, Any] = {"model": "none", "transform": "rigid"}
    value["paths"] = {"fixed": str(fixed), "moving": str(tmp_path / "moving.mha")}
    for name, typed, advice in (
        ("frame", "1", "expected one image: type a 'Time point' under 'More options', from 0 to 1"),
        ("channel", "0, 2", "expected one: type its 'Channel' under 'More options', from 0 to 2, or luminance"),
        ("nan", "-1e3", "expected none: type a number, such as 0, into 'Replace NaN by' under 'More options'"),
    ):
        with pytest.raises(CarlError) as error:
            jobs.run(server.task(value), lambda **_: None)
        assert app.for_page(str(error.value)).endswith(advice)
        assert f"{name} is " in refused(server, {**value, name: "third"})
        value[name] = typed
    assert server.task(value).options == {"transform": "rigid", "frame": 1, "channel": [0, 2], "nan": -1000}


def test_wrong_input_is_one_line(server: app.App, tmp_path: Path) -> None:
    fixed, moving = map(str, scans(tmp_path))
    assert "there is no fixed image; choose a file" in refused(server, {})
    assert "there is no moving image" in refused(server, {"paths": {"fixed": fixed}})
    assert "no.nii does not exist; expected" in refused(
        server, {"paths": {"fixed": f"{tmp_path}/no.nii", "moving": moving}}
    )
    both = {"fixed": fixed, "moving": moving}
    assert "unknown transform='bent'" in refused(server, {"paths": both, "transform": "bent"})
    assert "the options cannot be used" in refused(server, {"paths": both, "io_iterations": "many"})
    assert "names.csv does not exist" in refused(server, {"paths": both, "label_names": "names.csv"})
    assert "fixed_seg was given without moving_seg" in refused(server, {"paths": both | {"fixed_seg": fixed}})
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "report.json").write_text("{}")
    words = refused(server, {"paths": both, "out": str(tmp_path / "done")})
    assert "already holds report.json; choose another folder, or tick 'Replace an earlier result' under" in words
    assert server.job is None


def test_a_study_with_several_series(server: app.App, study: tuple[Path, dict[str, Image]]) -> None:  # noqa: F811
    """Folders of a study may use the same file names; the page lists the series, and takes the number of one."""
    for side in ("fixed", "moving"):
        for number, file in enumerate(sorted(study[0].iterdir())):
            assert upload(server, "IM0001.dcm", file.read_bytes(), side, int(number == 0))[0] == 200
    assert len(server.uploads("fixed")) == 15
    value: dict[str, Any] = {"model": "none", "transform": "rigid"}

    def end_of(value: dict[str, Any]) -> dict[str, Any]:
        assert post(server, "start", json.dumps(value).encode())[0] == 200
        assert server.job is not None
        server.job._reader.join(60)
        return json.loads(ask(server, "job.json")[1])

    failed = end_of(value)
    assert failed["message"].startswith("the dropped folder holds 3 DICOM series: 1 'localizer' (CT, 3 files), 2")
    assert failed["message"].endswith("expected one: type its number under 'More options', such as 1")
    assert end_of(value | {"fixed_series": "2", "moving_series": "venous"})["state"] == "done"
    assert post(server, "show", b"{}")[0] == 200
    scene = json.loads(ask(server, "scene.json")[1])
    assert scene["notes"] == []  # both series are shown
    assert {"fixed", "moving"} <= scene["volumes"].keys()


def opened(page: Page, server: app.App) -> None:
    page.open(server.url, width=900, height=700)
    page.wait("document.body.dataset.ready === 'yes'")


def drop(page: Page, side: str, path: Path) -> None:
    """Drop a file on a zone of the page."""
    content = base64.b64encode(path.read_bytes()).decode()
    page.get(
        f"(() => {{ const bytes = Uint8Array.from(atob('{content}'), (c) => c.charCodeAt(0));"
        f" const transfer = new DataTransfer(); transfer.items.add(new File([bytes], '{path.name}'));"
        f" document.querySelector('[data-side={side}]').dispatchEvent(new DragEvent('drop', {{dataTransfer: transfer,"
        " bubbles: true, cancelable: true})); })()"
    )
    page.wait(f"document.querySelector('[data-side={side}] .chosen').textContent === '{path.name}'")


@pytest.mark.browser
@needs_browser
def test_from_a_drop_to_the_result(tab: Page, tmp_path: Path) -> None:
    (fixed, moving), model = scans(tmp_path), network(tmp_path)
    broken = tmp_path / "broken.nii"
    broken.write_bytes(fixed.read_bytes()[:400])
    with running(model=str(model), out=tmp_path / "kept") as server:
        tab.open(server.url, width=900, height=700)
        tab.wait("document.body.dataset.ready === 'yes'")
        assert tab.get("byId('start').disabled") is True
        drop(tab, "fixed", broken)
        drop(tab, "moving", moving)
        assert tab.get("byId('start').disabled") is False

        tab.get("byId('start').click()")  # a file that cannot be read: a message in the page
        tab.wait("document.querySelector('.note')", 60)
        assert tab.get("byId('notes').textContent").startswith("broken.nii ")  # not where the app keeps it
        assert tab.get("byId('form').offsetHeight") > 100
        assert list((tmp_path / "kept").iterdir()) == []

        drop(tab, "fixed", fixed)
        assert tab.get("document.querySelector('.note')") is None
        tab.get("byId('start').click()")
        tab.wait("!byId('job').hidden")
        tab.get("byId('cancel').click()")
        tab.wait("byId('notes').textContent.includes('was cancelled')", 60)
        assert list((tmp_path / "kept").iterdir()) == []

        tab.get("(byId('refine').checked = false, byId('start').click())")
        tab.wait("location.pathname.endsWith('/view') && document.body.dataset.ready === 'yes'", 120)
        assert tab.get("Object.keys(panels).length") == 3
        assert tab.get("byId('home').hidden") is False
        report = tab.get("byId('report').href")
        name = tab.get("Array.from(document.querySelectorAll('#files a'), (a) => a.textContent)")
        assert {"transform.h5", "warped.nii.gz", "report.html"} <= set(name)
        assert [
            url for url in tab.requests if not url.startswith((server.url.rsplit("/", 2)[0], "data:", "blob:"))
        ] == []
        assert tab.complaints == []
        saved = urllib.request.urlopen(f"{server.url}files/warped.nii.gz").read()
        assert saved == (tmp_path / "kept" / "result" / "warped.nii.gz").read_bytes()
        assert images.read(tmp_path / "kept" / "result" / "warped.nii.gz").shape == images.read(fixed).shape
        tab.open(report)
        tab.wait("document.body.dataset.ready === 'yes'")
        tab.open(server.url, width=390, height=844)  # the result can be found again, on a phone's screen too
        tab.wait("document.body.dataset.ready === 'yes'")
        assert tab.get("byId('last').hidden") is False
        assert tab.get("document.documentElement.scrollWidth") == 390
    assert (tmp_path / "kept" / "result" / "report.json").is_file()


@pytest.mark.browser
@needs_browser
def test_a_registration_that_ended_while_the_page_was_closed(tab: Page, tmp_path: Path) -> None:
    out = save(tmp_path)
    with running() as server:
        failed = jobs.Status("failed", message=f"{server.folder / 'fixed' / 'a.nii'} is damaged")
        server.job = job = StandIn(jobs.Task({}, str(out)), failed)  # type: ignore[assignment]
        opened(tab, server)
        assert tab.get("byId('notes').textContent") == "a.nii is damaged"
        assert tab.get("byId('job').hidden") is True
        job.status = jobs.Status("done")
        tab.open(server.url)
        tab.wait("location.pathname.endsWith('/view') && document.body.dataset.ready === 'yes'")
        assert [scene.folder for scene in server.scenes] == [out]


@pytest.mark.browser
@needs_browser
def test_files_are_removed_in_the_page(tab: Page, tmp_path: Path) -> None:
    fixed, moving = scans(tmp_path)
    button = "document.querySelector('[data-side={}] .held button')"
    with running() as server:
        opened(tab, server)
        assert tab.get(f"{button.format('fixed')}.hidden") is True
        for side, path in (("fixed", fixed), ("moving", moving), ("fixed_seg", fixed)):
            drop(tab, side, path)
        opened(tab, server)
        remove = button.format("fixed_seg")
        assert tab.get(f"[{remove}.textContent, {remove}.ariaLabel]") == ["remove", "remove labels of the fixed image"]
        assert tab.get(f"({remove}.focus(), document.activeElement === {remove})") is True  # 'More options' is open
        tab.get(f"{remove}.click()")
        tab.wait(f"{remove}.hidden")
        assert server.uploads("fixed_seg") == []
        assert tab.get("document.activeElement.textContent") == "Choose a file"
        assert tab.get("byId('start').disabled") is False
        tab.get(f"{button.format('moving')}.click()")
        tab.wait("byId('wait').textContent === 'Choose the moving image.'")
        assert tab.get("byId('start').disabled") is True
        assert tab.complaints == []


@pytest.mark.browser
@needs_browser
def test_the_page_offers_what_its_messages_advise(tab: Page, tmp_path: Path) -> None:
    """A 4-D image, and a folder that holds a result, which is shown already."""
    out, (fixed, moving) = save(tmp_path), scans(tmp_path)
    scan = sitk.ReadImage(fixed)
    sitk.WriteImage(sitk.JoinSeries([scan, scan]), fixed)
    with running() as server:
        server.scenes.append(viewer.load_scene(out))
        opened(tab, server)
        for side, path in (("fixed", fixed), ("moving", moving)):
            tab.get(f"(zones.{side}.path.value = {str(path)!r}, refresh())")
        tab.get(f"(byId('out').value = {str(out)!r}, byId('model').value = 'none', byId('transform').value = 'rigid')")
        for field, enter in (
            ("Replace an earlier result", "byId('overwrite').click()"),
            ("Time point", "(byId('time_point').value = '1, 0', byId('nan').value = '0')"),
        ):
            tab.get("byId('start').click()")
            tab.wait(f"byId('job').hidden && byId('notes').textContent.includes(\"'{field}' under 'More options'\")")
            labels = tab.get("Array.from(document.querySelectorAll('#more label'), (one) => one.textContent.trim())")
            assert field in labels
            tab.get(enter)
        tab.get("byId('start').click()")
        tab.wait("location.pathname.endsWith('/view') && document.body.dataset.ready === 'yes'")
        assert tab.get("byId('notes').textContent") == ""  # the viewer shows the same part of the file
        assert [scene.folder for scene in server.scenes] == [out]
        options = json.loads((out / "report.json").read_text())["request"]["options"]
        assert (options["frame"], options["nan"]) == ([1, 0], 0)


@pytest.mark.browser
@needs_browser
def test_a_drop_without_a_file_is_explained(tab: Page) -> None:
    drop_nothing = "dispatchEvent(new DragEvent('drop', {dataTransfer: new DataTransfer(), bubbles: true}))"
    with running() as server:
        opened(tab, server)
        for place, words in (
            ("document.querySelector('[data-side=fixed]')", "There was no file in what you dropped. "),
            ("byId('form')", "That was dropped beside the zones. "),
        ):
            tab.get(f"{place}.{drop_nothing}")
            tab.wait(f"byId('notes').textContent.startsWith({words!r})")
            assert tab.get("document.querySelectorAll('.note').length") == 1
        assert tab.complaints == []
        tab.open(server.url, width=390, height=500)
        tab.wait("document.body.dataset.ready === 'yes'")
        tab.get("(byId('more').open = true, scrollTo(0, 1e4))")
        tab.get("(byId('start').disabled = false, byId('start').click())")
        tab.wait("byId('notes').textContent.includes('there is no fixed image')")
        top, bottom = tab.get("(({top, bottom}) => [top, bottom])(byId('notes').getBoundingClientRect())")
        assert 0 <= top < bottom <= 500  # it can be seen, though the button is far below


@pytest.mark.browser
@needs_browser
def test_two_tabs(tab: Page, tmp_path: Path) -> None:
    """What one tab does is not mistaken in the other, for which the test sends requests itself."""
    (fixed, moving), out = scans(tmp_path), save(tmp_path)
    with running() as server:
        opened(tab, server)
        for side, path in (("fixed", fixed), ("moving", moving)):
            drop(tab, side, path)
        assert upload(server, fixed.name, moving.read_bytes())[0] == 200  # by its name, the same file
        tab.get("byId('start').click()")
        tab.wait("byId('notes').textContent.startsWith('another tab has changed the files; reload this page')")
        assert server.job is None

        opened(tab, server)
        job = server.job = StandIn(jobs.Task({}, str(out)), jobs.Status("running", "optimisation", 60))  # type: ignore[assignment]
        tab.get("byId('start').click()")
        tab.wait("!byId('job').hidden")
        assert tab.get("byId('notes').textContent").startswith("a registration is running already")
        assert tab.get("byId('phase').textContent") == "optimisation, 60 %, 3 s"
        job.status = jobs.Status("done")
        for _ in range(2):  # both tabs may have seen that it is done
            assert post(server, "show")[0] == 200
        tab.wait("location.pathname.endsWith('/view') && document.body.dataset.ready === 'yes'")
        assert [scene.folder for scene in server.scenes] == [out]
        assert post(server, "show", b'{"result": 7}')[0] == 400


def test_the_command_serves_until_it_is_stopped() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-m", "carlreg", "app", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/\S+/", process.stderr.readline())
            assert address is not None
            assert b"Register two scans" in urllib.request.urlopen(address[0]).read()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
