"""Headless Chromium, driven over a pipe with its DevTools protocol.

Records the requests and the console messages of a page. Needs nothing but Chromium itself.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # not available to root
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WEBGL = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")
NO_WEBGL = ("--disable-3d-apis",)
EXECUTABLE = None if os.name == "nt" else next((path for name in NAMES if (path := shutil.which(name))), None)
LEAVING = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")
"""What Chromium answers if a page is left while it evaluates an expression."""
needs_browser = pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")


class BrowserError(RuntimeError):
    """What Chromium answered instead of doing as it was told."""


class Page:
    """One tab. `requests` are the addresses it asked for since `open`; `complaints` are errors and warnings on its
    console."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the protocol and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._send, text) :]
        end = time.monotonic() + 60
        while (answer := self._next(end)).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._receive], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError("Chromium did not answer")
            if not (part := os.read(self._receive, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in values["args"]))
        elif event.get("method") == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            if "GL Driver Message (OpenGL, Performance" in values["entry"]["text"]:
                return  # drawing on a CPU is slow
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1) -> None:
        """Go to an address, in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=url)

    def get(self, expression: str) -> Any:
        """Evaluate a JavaScript expression; wait for a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true. While a page loads, it may raise, and the page may be left for another."""
        end = time.monotonic() + seconds
        expression = f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"
        while True:
            try:
                if self.get(expression):
                    return
            except BrowserError as error:
                if not any(words in str(error) for words in LEAVING):
                    raise
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; the page complains of {self.complaints}")
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until everything is drawn."""
        self.get("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, button: str = "left", **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, **more)

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Click at a position of the window, twice if `count` is 2."""
        self.mouse("mouseMoved", x, y, "none")
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, clickCount=number)

    def drag(self, x: float, y: float, across: float, down: float) -> None:
        """Press at a position, move and release."""
        self.mouse("mouseMoved", x, y, "none")
        self.mouse("mousePressed", x, y, clickCount=1)
        for part in (0.5, 1):
            self.mouse("mouseMoved", x + part * across, y + part * down, buttons=1)
        self.mouse("mouseReleased", x + across, y + down, clickCount=1)

    def wheel(self, x: float, y: float, down: float) -> None:
        """Turn the wheel at a position; a notch is 100."""
        self.mouse("mouseWheel", x, y, "none", deltaX=0, deltaY=down)

    def key(self, name: str) -> None:
        """Press and release a key."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name])

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, as a user does."""
        self.get(
            f"((one) => {{ one.value = {value!r}; one.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({selector!r}))"
        )

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, after scrolling to it."""
        self.get(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        return tuple(
            self.get(f"(({{left, top, width, height}}) => [left, top, width, height])"
                     f"(document.querySelector({selector!r}).getBoundingClientRect())")
        )  # fmt: skip

    def png(self, whole: bool = False) -> bytes:
        """Take a screenshot of the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])


@contextmanager
def chromium(*flags: str) -> Iterator[Page]:
    """Start Chromium and stop it afterwards."""
    import fcntl

    assert EXECUTABLE is not None
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    # Chromium reads from 3 and writes to 4: neither may be overwritten before it is copied. A shell copies them, since
    # Python code between fork and exec can deadlock in a process with threads.
    far_in, far_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))
    shell = ["/bin/sh", "-c", f'exec "$@" 3</dev/fd/{far_in} 4>/dev/fd/{far_out}', "sh"]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [*shell, EXECUTABLE, *FLAGS, *(flags or NO_WEBGL), f"--user-data-dir={folder}"]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(far_in, far_out), **quiet)
        for fd in (theirs_in, theirs_out, far_in, far_out):
            os.close(fd)
        try:
            yield Page(ours_out, ours_in)
        finally:
            for fd in (ours_in, ours_out):  # it ends when its pipe does
                os.close(fd)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
