"""The process of a registration that the viewer or the app starts; see `jobs`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
from typing import Any

from carlreg.errors import user_message
from carlreg.show.viewer.jobs import Task, run


def main() -> None:
    """Read a task from the standard input, do it, and print how far it is, as JSON, a line each."""

    def stop(*_: object) -> None:
        raise SystemExit(143)  # so that unfinished files are removed

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which ends this process
    logging.basicConfig(format="carl: %(message)s")

    def report(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    task = Task(**json.loads(sys.stdin.readline()))
    threading.Thread(target=watch, daemon=True).start()
    try:
        run(task, report)
        report(state="done", phase="done", percent=100)
    except Exception as error:
        if (text := user_message(error)) is None:
            traceback.print_exception(error)
            text = f"this is a bug ({type(error).__name__}); the terminal shows the details"
        report(state="failed", message=text)
    sys.stdout.flush()
    os._exit(0)  # the thread still reads


if __name__ == "__main__":
    main()
