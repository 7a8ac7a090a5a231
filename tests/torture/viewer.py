"""Requests to the viewer's server: no file outside the scene is served, and the server survives."""

from __future__ import annotations

import functools
import http.client
import threading
from urllib.parse import quote

from torture.bench import scene
from torture.families import Family, generator

SECRET = b"nobody may read this"
PARTS = (
    "..",
    "%2e%2e",
    ".",
    "volumes",
    "report.html",
    "api",
    "etc",
    "passwd",
    "secret.txt",
    "\0",
    "é",
    "a" * 300,
    "//",
    "\\",
)


@functools.cache
def address() -> tuple[str, int]:
    """A server for a result, in a thread, with a secret file beside the result."""
    from carlreg.show import viewer
    from torture.faults import finished_result

    folder = finished_result("moving")
    (scene() / "secret.txt").write_bytes(SECRET)
    server = viewer.serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    return str(host), int(port)


def request(case: int) -> str | None:
    rng = generator("viewer", case)
    path = "/" + "/".join(rng.choice(PARTS) for _ in range(rng.randint(0, 8)))
    if rng.random() < 0.5:
        path = quote(path, safe="/%.")
    method = rng.choice(("GET", "GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"))
    headers = {
        "Host": rng.choice(("127.0.0.1", "evil.example", "localhost")),
        "Origin": rng.choice(("null", "http://evil.example")),
    }
    connection = http.client.HTTPConnection(*address(), timeout=10)
    try:
        connection.putrequest(method, "".join(c if 32 < ord(c) < 127 else quote(c) for c in path), skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
    except (ConnectionError, http.client.HTTPException) as error:
        return f"{method} {path!r}: {type(error).__name__}"
    finally:
        connection.close()
    if SECRET in body or b"root:" in body:
        return f"{method} {path!r} gave away a file"
    if answer.status >= 500 and answer.status != 501:
        return f"{method} {path!r}: status {answer.status}"
    return None


def families() -> list[Family]:
    return [Family("requests to the viewer", 2_000, request)]
