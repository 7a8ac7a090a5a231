"""A small web server for one user on the same machine.

It binds to the loopback address and answers under a path that others cannot guess. It serves a fixed list of names, and
refuses requests that a page from elsewhere makes the user's browser send. Whatever changes something is a POST request,
which must come from our own page: it has its origin, and a token that only that page knows. The folder's report.html
may come from a stranger: it gets a secret path and, by a sandbox, an origin of its own, and so reaches nothing else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import sys
import threading
import traceback
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from io import BufferedIOBase
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import numpy as np

from carlreg.errors import InputError, user_message
from carlreg.files.results import NAMES, PAGE
from carlreg.show.viewer.guide import guided_task, points_path, read_pairs, save_pairs
from carlreg.show.viewer.jobs import Job, Task
from carlreg.show.viewer.scene import RAS, Scene, load_scene, nifti

HOST = "127.0.0.1"
ASSETS = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "niivue.js": ("vendor/niivue.umd.js", "text/javascript"),
}
LARGEST_BODY = 1_000_000
"""Bytes of a request, other than an upload."""
NO_JOB = {"state": "none"}
"""What the page is told if nothing runs, or if another tab has shown the result already."""
DOWNLOAD = "files/"
"""Before the names of files of the result that can be saved."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
VIEWER_HEADERS = HEADERS | {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
REPORT_HEADERS = HEADERS | {  # browsers refuse an opener policy for a sandboxed page
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Refusal(Exception):  # noqa: N818  (an answer to the client, not an error of the server)
    """A request that is answered with a status and a line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Response(NamedTuple):
    """The content type, body and headers of an answer."""

    kind: str
    body: bytes
    headers: dict[str, str] = VIEWER_HEADERS
    status: int = 200


class Server(ThreadingHTTPServer):
    """Serves the pages and volumes of a scene at `url`; see `serve`."""

    daemon_threads = True
    has_home = False
    """Whether there is a page without a result."""
    allow_reuse_address = os.name != "nt"  # on Windows this would let two servers share a port

    def __init__(self, scene: Scene | None, port: int = 0, *, model: str | None = None, trust: bool = False) -> None:
        self.scenes = [] if scene is None else [scene]  # the last is shown
        self.model, self.trust = model, trust
        self.secret, self.report_secret, self.token = (secrets.token_urlsafe(16) for _ in range(3))
        self.lock = threading.Lock()  # volumes are computed once
        self.job: Job | None = None
        super().__init__((HOST, port), _Handler)

    @property
    def scene(self) -> Scene:
        if not self.scenes:
            raise Refusal(404, "there is no result yet")
        return self.scenes[-1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    @property
    def report_path(self) -> str | None:
        return None if not self.scenes or self.scene.report is None else f"/{self.report_secret}/{PAGE}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection early."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Stop serving, and end a registration that runs."""
        super().server_close()
        if self.job is not None:
            self.job.cancel()

    def respond(self, target: str) -> Response:
        """Answer a request for a path with its query."""
        path, _, query = target.partition("?")
        report = self.scene.report if self.scenes else None
        if report is not None and _equal(path, self.report_path or ""):
            return Response("text/html", report.read_bytes(), REPORT_HEADERS)
        name, options = self.name_of(path), options_of(query)
        if (asset := self.asset(name)) is not None:
            return asset
        with self.lock:
            return self.respond_from_scene(name, options)

    def name_of(self, path: str) -> str:
        """What is asked for, by its path after the secret."""
        prefix = f"/{self.secret}/"
        if not _equal(path[: len(prefix)], prefix):
            raise Refusal(404, "there is nothing here; use the whole address that carl printed")
        return path[len(prefix) :]

    def asset(self, name: str) -> Response | None:
        """A file of the package."""
        if name not in ASSETS:
            return None
        file, kind = ASSETS[name]
        return Response(kind, (resources.files(__package__) / file).read_bytes())

    def respond_from_scene(self, name: str, options: dict[str, str]) -> Response:
        if name == "scene.json":
            results = [scene.folder.name for scene in self.scenes]
            return to_json(
                {**self.scene.describe(), "report": self.report_path, "results": results, "token": self.token}
                | {"home": self.has_home, "correcting": self.job is not None and "guide" in self.job.task.inputs}
                | {"files": [file for file in NAMES if self.scene.file(file) is not None]}
            )
        if name == "match.json":
            start = choice_of(options, "from", ("fixed", "moving"))
            return to_json(self.scene.match(_point(options), start=start))
        if name == "at.json":
            return to_json(self.scene.at(choice_of(options, "side", tuple(self.scene.sides)), _point(options)))
        if name == "job.json":
            return to_json(NO_JOB if self.job is None else self.describe_job(self.job))
        if name.endswith(".nii") and (volume := name.removesuffix(".nii")) in self.scene.volumes:
            return Response("application/octet-stream", nifti(self.scene.volume(volume)))
        if name.startswith(DOWNLOAD) and (file := self.scene.file(name.removeprefix(DOWNLOAD))) is not None:
            attached = {"Content-Disposition": f'attachment; filename="{file.name}"'}
            return Response("application/octet-stream", file.read_bytes(), VIEWER_HEADERS | attached)
        raise Refusal(404, "there is nothing here")

    def describe_job(self, job: Job) -> dict[str, Any]:
        """How far a registration is, for the page."""
        return job.describe()

    # ---- requests that change something ----

    posts: tuple[str, ...] = ("points", "guide", "cancel", "show")
    """What can be asked for by POST."""

    def change(self, name: str, body: BufferedIOBase, length: int, options: dict[str, str]) -> Response:
        """Answer a POST request for one of `posts`."""
        value = read_json(body, length)
        with self.lock:
            return self.change_scene(name, value)

    def change_scene(self, name: str, value: dict[str, Any]) -> Response:
        if name == "cancel":
            if self.job is not None:
                self.job.cancel()
            return to_json({})
        if name == "show":
            self.show(value.get("result"))
            return to_json({})
        pairs = read_pairs(value.get("pairs"), self.scene.transform.dim)
        if name == "points":
            return to_json({"path": str(save_pairs(pairs, points_path(self.scene)))})
        self.start(guided_task(self.scene, pairs, self.model))
        return to_json({})

    def start(self, task: Task) -> None:
        """Start a registration, one at a time."""
        if self.job is not None and self.job.status.state == "running":
            raise Refusal(409, "a registration is running already; wait for it, or cancel it")
        self.job = Job(task)

    def show(self, result: object) -> None:
        """Show a result of before, by its number, or that of the job that has ended, if no other tab has done so."""
        if isinstance(result, int) and 0 <= result < len(self.scenes):
            self.scenes.append(self.scenes.pop(result))
        elif self.job is not None and self.job.status.state == "done":
            scene = load_scene(self.job.task.out, trust=self.trust)
            self.scenes = [*(one for one in self.scenes if one.folder != scene.folder), scene]  # it may be replaced
            self.job = None
        elif result is not None or self.job is not None or not self.scenes:
            raise Refusal(400, "there is no such result")


def serve(folder: str | os.PathLike[str], *, port: int = 0, trust: bool = False, model: str | None = None) -> Server:
    """Create a server for a result folder, bound to a port (0: any free one) but not yet serving.

    `model` is used to register again with points, if the result was made with one that is not part of the package.

    >>> with serve("out") as server:
    ...     server.serve_forever()
    """
    scene = load_scene(folder, trust=trust)
    with port_errors(port):
        return Server(scene, port, model=model, trust=trust)


@contextmanager
def port_errors(port: int) -> Iterator[None]:
    """Raise a port that cannot be used as an error that names it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason = "is in use" if error.errno == errno.EADDRINUSE else "needs permissions that you do not have"
            raise InputError(f"port {port} {reason}; choose another one, or omit --port to use any free one") from error
        raise


def open_browser(url: str) -> bool:
    """Open an address in the user's browser, if there is a graphical one."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False  # only text browsers, which take over the terminal, would start
    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "carl", ""
    timeout = 60

    def do_GET(self) -> None:
        self._answer(lambda: self.server.respond(self.path))

    def do_POST(self) -> None:
        self._answer(self._change)

    def _change(self) -> Response:
        path, _, query = self.path.partition("?")
        name = self.server.name_of(path)
        if name not in self.server.posts:
            raise Refusal(405, "this cannot be changed")
        if self.headers.get("Origin") is None or not _equal(self.headers.get("X-Carl-Token", ""), self.server.token):
            raise Refusal(403, "only the page that this server gave out may change something; reload it")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refusal(411, "the request does not state its length")
        return self.server.change(name, self.rfile, int(length), options_of(query))

    def _answer(self, act: Callable[[], Response]) -> None:
        try:
            self._check_origin()
            response = act()
        except Refusal as refusal:
            response = Response("text/plain", f"{refusal}\n".encode(), status=refusal.status)
        except Exception as error:
            if (message := user_message(error)) is None:
                traceback.print_exception(error)
                message = "internal error; the terminal shows the details"
            response = Response("text/plain", f"{message}\n".encode(), status=500)
        charset = "" if response.kind == "application/octet-stream" else "; charset=utf-8"
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.kind + charset)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        self.wfile.write(response.body)

    def _check_origin(self) -> None:
        """Accept requests of the user or of our own page only.

        A name made to point here (DNS rebinding) shows in Host, a page from elsewhere in Origin or Sec-Fetch-Site.
        """
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]:
            raise Refusal(403, "this host is not served")
        if origin is not None and origin != f"http://{host}":
            raise Refusal(403, "requests from other origins are refused")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refusal(403, "requests from other sites are refused; copy the address into the browser")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _equal(first: str, second: str) -> bool:
    return secrets.compare_digest(first.encode(), second.encode())


def to_json(value: Any) -> Response:
    return Response("application/json", json.dumps(value).encode())


def options_of(query: str) -> dict[str, str]:
    return {key: values[-1] for key, values in parse_qs(query).items()}


def read_json(body: BufferedIOBase, length: int) -> dict[str, Any]:
    """The object in the body of a request."""
    if length > LARGEST_BODY:
        raise Refusal(413, f"the request has {length} bytes; expected at most {LARGEST_BODY}")
    try:
        value = json.loads(body.read(length) or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refusal(400, "the request is not a JSON object")
    return value


def choice_of(options: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = options.get(name, choices[0])
    if value not in choices:
        raise Refusal(400, f"{name} is {value!r}; expected {' or '.join(choices)}")
    return value


def _point(options: dict[str, str]) -> Any:
    """Parse `point=x,y,z` in mm, LPS unless `frame=ras`, into LPS coordinates (3,)."""
    text = options.get("point", "")
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(number) and abs(number) < 1e6 for number in numbers):
        raise Refusal(400, f"point is {text!r}; expected x,y,z in mm")
    return np.array(numbers) * (RAS if choice_of(options, "frame", ("lps", "ras")) == "ras" else 1)
