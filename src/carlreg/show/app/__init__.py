"""`carl app`: choose two scans in the browser, register them, and look at the result in the viewer.

The server is that of the viewer, and so serves this machine only. Files that the user drops are stored in a private
temporary folder, which is removed at the end.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from contextlib import suppress
from importlib import resources
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from carlreg.errors import OVERWRITE, ExistsError, InputError
from carlreg.files.images import TWO_FILES
from carlreg.files.label_names import TABLES, read_names
from carlreg.files.results import ResultFolder
from carlreg.registration.options import PairInputs
from carlreg.show.viewer.jobs import Job, Task, free_path, task_options
from carlreg.show.viewer.server import Refusal, Response, Server, choice_of, port_errors, read_json, to_json

ASSETS = {"": ("page.html", "text/html"), "app.css": ("app.css", "text/css"), "app.js": ("app.js", "text/javascript")}
INPUTS = ("fixed", "moving", "fixed_seg", "moving_seg")
NUMBERS = ("frame", "channel", "nan")
OPTIONS = ("transform", "io_iterations", "io_sim", "certainty", "fixed_series", "moving_series", *NUMBERS)
"""What the page can choose, of `RegisterOptions`."""
ADVICE = {
    "choose it by --series": "type its number under 'More options', such as",
    "choose a time point by --frame N": "type a 'Time point' under 'More options'",
    "choose it by --channel N": "type its 'Channel' under 'More options'",
    "or --channel luminance": "or luminance",
    "replace them by --nan 0": "type a number, such as 0, into 'Replace NaN by' under 'More options'",
    OVERWRITE: "tick 'Replace an earlier result' under 'More options'",
}
"""What messages say to users of the command line, and what they say in the page instead."""
RESERVE = 500_000_000
"""Bytes of the disk that uploads leave free, for results."""
CHUNK = 1 << 20


class App(Server):
    """Serves the page without a result, takes files and starts registrations; see `serve`."""

    posts = (*Server.posts, "upload", "remove", "start")
    has_home = True

    def __init__(self, port: int = 0, *, model: str | None = None, out: Path | None = None) -> None:
        super().__init__(None, port, model=model)
        self.out = out
        self.folder = Path(tempfile.mkdtemp(prefix="carl-app-"))  # which nobody else may read
        self.changes = dict.fromkeys(INPUTS, 0)  # how often the uploads of each were replaced or removed

    def server_close(self) -> None:
        """Stop serving, end a registration that runs, and remove the uploads."""
        super().server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def asset(self, name: str) -> Response | None:
        if name in ASSETS:
            file, kind = ASSETS[name]
            return Response(kind, (resources.files(__package__) / file).read_bytes())
        return super().asset("" if name == "view" else name)

    def respond_from_scene(self, name: str, options: dict[str, str]) -> Response:
        if name == "app.json":
            return to_json(self.describe())
        return super().respond_from_scene(name, options)

    def describe(self) -> dict[str, Any]:
        """What the page needs."""
        from carlreg.model.shipped import available

        return {
            "token": self.token,
            "limit": max(shutil.disk_usage(self.folder).free - RESERVE, 0),
            "models": available(),
            "model": self.model,
            "tables": sorted(TABLES),
            "out": None if self.out is None else str(self.out.absolute()),
            "uploads": {name: [path.name for path in self.uploads(name)] for name in INPUTS},
            "changes": self.changes,
            "job": None if self.job is None else self.describe_job(self.job),
            "has_result": bool(self.scenes),
        }

    def describe_job(self, job: Job) -> dict[str, Any]:
        """Its message names files as the user dropped them, and what the page has."""
        state = super().describe_job(job)
        for name in INPUTS:
            folder = str(self.folder / name)
            state["message"] = state["message"].replace(folder + os.sep, "").replace(folder, "the dropped folder")
        state["message"] = for_page(state["message"])
        return state

    # ---- requests that change something ----

    def change(self, name: str, body: BufferedIOBase, length: int, options: dict[str, str]) -> Response:
        if name == "upload":  # without the lock: it may take a while
            return self.upload(body, length, options)
        if name not in ("remove", "start"):
            return super().change(name, body, length, options)
        value = read_json(body, length)
        with self.lock:
            if name == "start":
                self.start(self.task(value))
                return to_json({})
            return self.remove(options)

    def folder_of(self, options: dict[str, str]) -> Path:
        """Where the files of one of `INPUTS` are stored."""
        if "side" not in options:
            raise Refusal(400, "the request does not name an input")
        return self.folder / choice_of(options, "side", INPUTS)

    def remove(self, options: dict[str, str]) -> Response:
        """Remove the files of one of `INPUTS`."""
        folder = self.folder_of(options)
        shutil.rmtree(folder, ignore_errors=True)
        self.changes[folder.name] += 1
        return to_json({"changes": self.changes[folder.name]})

    def upload(self, body: BufferedIOBase, length: int, options: dict[str, str]) -> Response:
        """Store a file that belongs to one of `INPUTS`; its first one replaces those of before."""
        folder = self.folder_of(options)
        if length > self.describe()["limit"]:
            raise Refusal(
                413, f"the file has {length / 1e6:.0f} MB, more than the disk has room for; type its path instead"
            )
        if options.get("first") == "1":
            with self.lock:
                self.remove(options)
        changes = self.changes[folder.name]
        folder.mkdir(exist_ok=True)
        path, left = free_name(folder / safe_name(options.get("name", ""))), length
        try:
            with open(path, "wb") as file:
                while left and (chunk := body.read(min(left, CHUNK))):
                    left -= file.write(chunk)
            if left:
                raise Refusal(400, "the upload ended early; try again")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return to_json({"name": path.name, "changes": changes})

    def uploads(self, name: str) -> list[Path]:
        return sorted(path for path in (self.folder / name).glob("*") if path.is_file())

    def source(self, name: str, typed: object) -> str | None:
        """The path of an input: as typed, or of what was uploaded: a file, a header with its voxels, or a folder."""
        if isinstance(typed, str) and typed.strip():
            path = Path(typed.strip().strip("\"'")).expanduser()
            if not path.exists():
                raise InputError(f"{path} does not exist; expected a file or a DICOM folder: check the path")
            return str(path.absolute())
        files = self.uploads(name)
        if len(files) < 2:
            return str(files[0]) if files else None
        headers = [file for file in files if file.name.lower().endswith(TWO_FILES) and not file.name.endswith(".img")]
        return str(headers[0] if headers else files[0].parent)

    def task(self, value: dict[str, Any]) -> Task:
        """The registration that the page asks for."""
        paths, seen = value.get("paths"), value.get("changes")
        typed = paths if isinstance(paths, dict) else {}
        used = [name for name in INPUTS if not typed.get(name)]
        if isinstance(seen, dict) and any(seen.get(name) != self.changes[name] for name in used):
            raise Refusal(409, "another tab has changed the files; reload this page to see which ones are there")
        inputs = {name: path for name in INPUTS if (path := self.source(name, typed.get(name))) is not None}
        for name in ("fixed", "moving"):
            if name not in inputs:
                raise InputError(f"there is no {name} image; choose a file, drop one, or type its path")
        PairInputs(**inputs)
        options = {name: as_typed(name, value[name]) for name in OPTIONS if value.get(name) is not None}
        try:
            task_options(options)
        except TypeError as error:
            raise InputError(f"the options cannot be used ({error})") from error
        model, names = value.get("model") or self.model or "default", value.get("label_names")
        named = read_names(names.strip()) if isinstance(names, str) and names.strip() else {}
        overwrite = value.get("overwrite") is True
        return Task(
            inputs,
            str(self.target(value.get("out"), overwrite=overwrite)),
            str(model),
            options,
            {str(k): v for k, v in named.items()},
            overwrite,
        )

    def target(self, typed: object, *, overwrite: bool) -> Path:
        """The folder for a result: as typed, or a new one in that of the command, or in the private one."""
        if isinstance(typed, str) and typed.strip():
            path = Path(typed.strip().strip("\"'")).expanduser().absolute()
            try:
                ResultFolder(path).check_free(overwrite=overwrite)
            except ExistsError as error:
                raise InputError(for_page(str(error))) from error
            return path
        root = self.folder / "results" if self.out is None else self.out.absolute()
        root.mkdir(parents=True, exist_ok=True)
        return free_path(root / "result")


def for_page(message: str) -> str:
    """A message that names fields of the page instead of options of the command line."""
    for option, field in ADVICE.items():
        message = message.replace(option, field)
    return message


def as_typed(name: str, value: object) -> object:
    """An option, with numbers where the user typed them: one for both images, or two, separated by a comma."""
    if not isinstance(value, str) or name not in NUMBERS:
        return value
    parts = [_number(part.strip()) for part in value.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _number(text: str) -> float | str:
    """The number that a text is; or else the text, which `RegisterOptions` checks."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def safe_name(name: str) -> str:
    """The last part of a name, unchanged but for characters that some systems refuse: a header may refer to it."""
    last = re.split(r"[/\\]", name)[-1]
    cleaned = "".join(one if one.isprintable() and one not in ':*?"<>|' else "_" for one in last).lstrip(".")
    return cleaned[-120:].lstrip(".") or "file"


def free_name(path: Path) -> Path:
    """The path, with a number in front if it exists: folders of a study may use the same names."""
    return next(
        one
        for n in itertools.count(1)
        if not (one := path.with_name(f"{n}_{path.name}" if n > 1 else path.name)).exists()
    )


def serve(*, port: int = 0, model: str | None = None, out: Path | None = None) -> App:
    """Create a server for the app, bound to a port (0: any free one) but not yet serving.

    `model` is used instead of the default one. Results go to new folders in `out`, or are removed at the end.

    >>> with serve() as server:
    ...     server.serve_forever()
    """
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected a folder for the results")
    with port_errors(port):
        return App(port, model=model, out=out)
