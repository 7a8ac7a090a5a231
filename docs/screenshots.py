"""Take the pictures of docs/images in Chromium from a folder that `carl demo` wrote, and the tour of the README.

python docs/screenshots.py carl-demo/pair            # report, viewer and app, on a desk and on a phone
python docs/screenshots.py carl-demo/pair --tour     # the animation, too: it starts a registration and cancels it
python docs/screenshots.py carl-demo/pair --site site    # pages of the website, too, built by docs/build.py
python docs/screenshots.py carl-demo/pair --cohort out    # the gallery of synthetic patients, too, registered into out
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import WEBGL, Page, chromium  # noqa: E402

from carlreg import register_many  # noqa: E402
from carlreg.files import images, world_transform  # noqa: E402
from carlreg.show import app, viewer  # noqa: E402
from carlreg.show.display import grey_scale  # noqa: E402
from carlreg.synthesis import patient  # noqa: E402

PICTURES = ROOT / "docs" / "images"
DESK, PHONE = (1400, 900), (390, 844)
QUALITY = 58
READY = "document.body.dataset.ready === 'yes'"
TOUR_WIDTH = 840


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tour", action="store_true")
    parser.add_argument("--site", type=Path)
    parser.add_argument("--cohort", type=Path)
    given = parser.parse_args()
    before_and_after(given.folder)
    with chromium(*WEBGL) as page:
        with running(viewer.serve(given.folder)) as server:
            shoot_report(page, server)
            shoot_viewer(page, server)
        with running(app.serve()) as server:
            shoot_app(page, server)
        if given.tour:
            tour(page, given.folder)
        if given.site:
            shoot_site(page, given.site)
        if given.cohort:
            shoot_gallery(page, given.cohort)


@contextmanager
def running(server: viewer.Server) -> Iterator[viewer.Server]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def show(
    page: Page, url: str, size: tuple[int, int] = DESK, ready: str = "document.body.dataset.ready === 'yes'"
) -> None:
    page.open(url, width=size[0], height=size[1])
    page.wait(ready, 180)
    page.settle()


def picture(page: Page) -> Image.Image:
    page.settle()
    return Image.open(io.BytesIO(page.png())).convert("RGB")


def save(name: str, page: Page) -> None:
    picture(page).save(PICTURES / f"{name}.webp", quality=QUALITY, method=6)


def shoot_report(page: Page, server: viewer.Server) -> None:
    address = urljoin(server.url, server.report_path or "")
    show(page, address)
    page.choose("#view", "blend")
    save("report", page)
    show(page, address, PHONE)
    save("report-phone", page)


def shoot_viewer(page: Page, server: viewer.Server) -> None:
    for name, size in (("view", DESK), ("view-phone", PHONE)):
        show(page, server.url, size)
        page.get("(byId('overlay').value = 'labels', byId('opacity').value = 40, changeOverlay())")
        save(name, page)
    show(page, server.url)
    correct(page)
    save("correct", page)


def correct(page: Page) -> None:
    """Mark a pair of points: the second is where a user might click."""
    page.get("byId('correct').click()")
    page.settle()
    for ras, shift in (((-60.0, 20.0, 40.0), 4.0), ((70.0, -20.0, 30.0), -5.0)):
        page.get(f"(place('fixed', {list(ras)}), go('fixed', {list(ras)}))")
        page.get(
            f"((there) => (place('moving', there), go('moving', there)))(at.moving.map((x, a) => x + {shift} * !a))"
        )
        page.get("byId('add').onclick()")
        page.settle()


def shoot_app(page: Page, server: viewer.Server) -> None:
    for name, size in (("app", DESK), ("app-phone", PHONE)):
        show(page, server.url, size)
        for side in ("fixed", "moving"):
            page.get(f"take('{side}', zones.{side}, [new File(['0'], '{side}.nii.gz')])")
        save(name, page)


def shoot_site(page: Page, site: Path) -> None:
    """The first page of the website, and one on a phone."""
    for name, file, size in (("docs", "index.html", DESK), ("docs-phone", "docs/app.html", PHONE)):
        show(page, (site / file).resolve().as_uri(), size, "document.readyState === 'complete'")
        save(name, page)


def register_patients(folder: Path) -> None:
    """Five synthetic patients on a sixth, by the network alone; the last scan shows more of the chest."""
    scans, moves = folder / "scans", (0, 0, 20, -20, 30, -110)
    scans.mkdir(parents=True)
    for number, up in enumerate(moves):
        scan = patient(number).moved((0, 0, up)).scan((80, 80, 64), 4.8, seed=number)
        place = folder / "fixed" if number == 0 else scans / f"patient{number}"
        images.write(images.Image(scan.data, scan.affine), f"{place}.nii.gz")
        images.write(images.Image(scan.labels, scan.affine), f"{place}_labels.nii.gz")
    fixed = {"fixed": folder / "fixed.nii.gz", "fixed_seg": folder / "fixed_labels.nii.gz"}
    register_many(scans, folder / "cohort", **fixed, io_iterations=0, device="cpu")


def shoot_gallery(page: Page, folder: Path) -> None:
    if not folder.exists():
        register_patients(folder)
    for name, size in (("gallery", DESK), ("gallery-phone", PHONE)):
        show(page, (folder / "cohort" / "index.html").resolve().as_uri(), size, "document.images.length > 1")
        page.wait("Array.from(document.images).every((one) => one.complete)")
        save(name, page)


def before_and_after(folder: Path) -> None:
    """A coronal slice of both scans, and checkerboards of them before and after."""
    fixed, moving, warped = (images.read(folder / f"{name}.nii.gz") for name in ("fixed", "moving", "warped"))
    unmoved = world_transform.apply(world_transform.WorldTransform.linear(np.eye(4)), moving, fixed)
    row = fixed.shape[1] // 2
    low, high = next(iter(grey_scale(fixed).windows.values()))

    def grey(image: images.Image) -> Any:
        return ((image.data[:, row, ::-1].T.astype(float) - low) / (high - low)).clip(0, 1)

    height, width = grey(fixed).shape
    rows, columns = np.indices((height, width))
    odd = (columns * 8 // width + rows * 6 // height) % 2 == 1
    sheets = [grey(fixed), grey(moving), *(np.where(odd, grey(other), grey(fixed)) for other in (unmoved, warped))]
    sheet = Image.new("L", (4 * 2 * width + 3 * 6, 2 * height), 255)
    for number, one in enumerate(sheets):
        part = Image.fromarray((255 * one).astype("uint8")).resize((2 * width, 2 * height), Image.Resampling.BICUBIC)
        sheet.paste(part, (number * (2 * width + 6), 0))
    sheet.save(PICTURES / "before-after.webp", quality=QUALITY, method=6)


# ---- the tour -------------------------------------------------------------------------------------------------------


def tour(page: Page, folder: Path) -> None:
    """From two files to a corrected result, in half a minute."""
    frames: list[tuple[Image.Image, int]] = []

    def keep(milliseconds: int) -> None:
        one = picture(page)
        size = TOUR_WIDTH, round(TOUR_WIDTH * one.height / one.width)
        frames.append((one.resize(size, Image.Resampling.LANCZOS), milliseconds))

    with running(app.serve()) as server:
        show(page, server.url)
        keep(2000)
        paths = {side: str((folder / f"{side}.nii.gz").absolute()) for side in ("fixed", "moving")}
        for side in paths:
            page.get(f"fill(zones.{side}, ['{side}.nii.gz'])")
            keep(1200)
        begin = "byId('job').hidden = false; refresh(); return follow(); "
        page.get(f"(async () => {{ await request('start', {{paths: {json.dumps(paths)}}}); {begin}}})()")
        page.wait("byId('phase').textContent.startsWith('network')", 180)
        keep(1500)
        page.wait("byId('progress').value > 12", 900)
        keep(1500)
        page.get("byId('cancel').click()")
    with running(viewer.serve(folder)) as server:
        show(page, server.url)
        keep(2200)
        for height in (10, 30, 50, 70):
            page.get(f"go('warped', [0, 0, {height}])")
            page.get(f"place('warped', [0, 0, {height}])")
            keep(700)
        for middle in ("blend", "checkerboard"):
            page.choose("#middle", middle)
            keep(2200)
        page.choose("#middle", "warped")
        page.get("(byId('overlay').value = 'labels', byId('opacity').value = 40, changeOverlay())")
        keep(2400)
        page.get("(byId('overlay').value = 'none', changeOverlay())")
        correct(page)
        keep(3000)
        show(page, urljoin(server.url, server.report_path or ""))
        keep(2200)
        for view in ("blend", "grid", "jacobian"):
            page.choose("#view", view)
            keep(2000)
    (first, _), *rest = frames
    first.save(
        PICTURES / "tour.webp",
        save_all=True,
        append_images=[one for one, _ in rest],
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        quality=56,
        method=6,
    )
    print(f"tour: {len(frames)} frames, {sum(milliseconds for _, milliseconds in frames) / 1000:.0f} s")


if __name__ == "__main__":
    main()
