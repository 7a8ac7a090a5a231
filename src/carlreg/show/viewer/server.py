"""A small web server for one user on the same machine.

It binds to the loopback address and answers GET requests only, under a path that others cannot guess. It serves a fixed
list of names, and refuses requests that a page from elsewhere makes the user's browser send. The folder's report.html
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import numpy as np

from carlreg.errors import InputError, user_message
from carlreg.files.results import PAGE
from carlreg.show.viewer.scene import RAS, Scene, load_scene, nifti

HOST = "127.0.0.1"
ASSETS = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "niivue.js": ("vendor/niivue.umd.js", "text/javascript"),
}
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
    """Serves one scene at `url`; see `serve`."""

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows this would let two servers share a port

    def __init__(self, scene: Scene, port: int = 0) -> None:
        self.scene = scene
        self.secret, self.report_secret = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.lock = threading.Lock()  # volumes are computed once
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    @property
    def report_path(self) -> str | None:
        return None if self.scene.report is None else f"/{self.report_secret}/{PAGE}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection early."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def respond(self, target: str) -> Response:
        """Answer a request for a path with its query."""
        path, _, query = target.partition("?")
        if self.scene.report is not None and _equal(path, self.report_path or ""):
            return Response("text/html", self.scene.report.read_bytes(), REPORT_HEADERS)
        prefix = f"/{self.secret}/"
        if not _equal(path[: len(prefix)], prefix):
            raise Refusal(404, "there is nothing here; use the whole address that carl printed")
        name, options = path[len(prefix) :], {key: values[-1] for key, values in parse_qs(query).items()}
        if name in ASSETS:
            file, kind = ASSETS[name]
            return Response(kind, (resources.files(__package__) / file).read_bytes())
        with self.lock:
            return self.respond_from_scene(name, options)

    def respond_from_scene(self, name: str, options: dict[str, str]) -> Response:
        if name == "scene.json":
            return _json({**self.scene.describe(), "report": self.report_path})
        if name == "match.json":
            start = _choice(options, "from", ("fixed", "moving"))
            return _json(self.scene.match(_point(options), start=start))
        if name.endswith(".nii") and (volume := name.removesuffix(".nii")) in self.scene.volumes:
            return Response("application/octet-stream", nifti(self.scene.volume(volume)))
        raise Refusal(404, "there is nothing here")


def serve(folder: str | os.PathLike[str], *, port: int = 0, trust: bool = False) -> Server:
    """Create a server for a result folder, bound to a port (0: any free one) but not yet serving.

    >>> with serve("out") as server:
    ...     server.serve_forever()
    """
    scene = load_scene(folder, trust=trust)
    try:
        return Server(scene, port)
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
        try:
            self._check_origin()
            response = self.server.respond(self.path)
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


def _json(value: Any) -> Response:
    return Response("application/json", json.dumps(value).encode())


def _choice(options: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
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
    return np.array(numbers) * (RAS if _choice(options, "frame", ("lps", "ras")) == "ras" else 1)
