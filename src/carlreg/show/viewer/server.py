"""A small web server for one reader on the same machine.

It binds to the loopback address and answers GET alone, under a path that others cannot guess. It serves a fixed list of
names, and refuses what a page from elsewhere might make the reader's browser ask for.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import sys
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from carlreg.errors import InputError
from carlreg.show.viewer.scene import RAS, Scene, find, nifti

HOST = "127.0.0.1"
REPORT = "report.html"
PAGE = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "niivue.js": ("vendor/niivue.umd.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Everything that the report shows is inside of it."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Refused(Exception):  # noqa: N818  (an answer, not an error of ours)
    """A request that gets a status and a line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves one scene at `url`; see `serve`."""

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # where it means that two may share a port

    def __init__(self, scene: Scene, port: int = 0) -> None:
        self.scene = scene
        self.secret = secrets.token_urlsafe(16)
        self.lock = threading.Lock()  # volumes are made once, whoever asks first
        super().__init__((HOST, port), _Handler)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{name}:{self.server_port}" for name in (HOST, "localhost"))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who leaves while something is sent is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def content(self, path: str, query: dict[str, str]) -> tuple[str, bytes]:
        """The type and bytes of a name below the secret path."""
        part = resources.files(__package__)
        if path in PAGE:
            name, kind = PAGE[path]
            return f"{kind}; charset=utf-8", (part / name).read_bytes()
        with self.lock:
            if path == "scene.json":
                report = (self.scene.folder / REPORT).is_file()
                return _json({**self.scene.describe(), "report": report})
            if path == "match.json":
                return _json(self.scene.match(_point(query), start=_one_of(query, "from", ("fixed", "moving"))))
            if path in {f"{name}.nii" for name in self.scene.volumes}:
                return "application/octet-stream", nifti(self.scene.volume(path.removesuffix(".nii")))
            if path == REPORT and (self.scene.folder / REPORT).is_file():
                return "text/html; charset=utf-8", (self.scene.folder / REPORT).read_bytes()
        raise Refused(404, "there is nothing here")


def serve(folder: str | os.PathLike[str], *, port: int = 0) -> Server:
    """A server for a folder of `carl register`, bound to a port (0: any free one) but not yet serving.

    >>> with serve("out") as server:
    ...     server.serve_forever()
    """
    scene = find(folder)
    try:
        return Server(scene, port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by you"
            raise InputError(f"port {port} {why}; choose another, or leave --port out for a free one") from error
        raise


def open_browser(url: str) -> bool:
    """Show an address in the reader's browser, if there is one that has a screen."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False  # only browsers that take over the terminal would be found
    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "carl", ""
    timeout = 60

    def do_GET(self) -> None:
        policy = POLICY
        try:
            self._check()
            start = f"/{self.server.secret}/"
            if not secrets.compare_digest(self.path[: len(start)].encode(), start.encode()):
                raise Refused(404, "there is nothing here; use the whole address that carl printed")
            path, _, given = self.path[len(start) :].partition("?")
            query = {name: values[-1] for name, values in parse_qs(given).items()}
            kind, body = self.server.content(path, query)
            status, policy = 200, REPORT_POLICY if path == REPORT else POLICY
        except Refused as refused:
            status, kind, body = refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode()
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            status, kind, body = 500, "text/plain; charset=utf-8", f"{text}\n".encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Security-Policy": policy, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check(self) -> None:
        """Only requests that the reader, or our own page, makes: a name that was made to point here (DNS rebinding)
        shows in Host, a page from elsewhere in Origin or Sec-Fetch-Site."""
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if host not in self.server.hosts:
            raise Refused(403, "this host is not served")
        if origin is not None and origin != f"http://{host}":
            raise Refused(403, "requests from other origins are refused")
        if site not in ("none", "same-origin"):
            raise Refused(403, "requests from other sites are refused; copy the address into the browser")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json; charset=utf-8", json.dumps(value).encode()


def _one_of(query: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = query.get(name, choices[0])
    if value not in choices:
        raise Refused(400, f"{name} is {value!r}; expected {' or '.join(choices)}")
    return value


def _point(query: dict[str, str]) -> Any:
    """`point=x,y,z` in mm, LPS unless `frame=ras`: (3,) in LPS."""
    text = query.get("point", "")
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(number) and abs(number) < 1e6 for number in numbers):
        raise Refused(400, f"point is {text!r}; expected x,y,z in mm")
    return np.array(numbers) * (RAS if _one_of(query, "frame", ("lps", "ras")) == "ras" else 1)
