"""NiiVue, which draws the viewer's images, brought into the package: when it is built, or by `make viewer`.

Runs with Python alone, since nothing else is there when a package is built. The file is the one whose checksum stands
here, or none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@niivue/niivue@0.69.0"
MEMBER = "package/dist/niivue.umd.js"
SHA256 = "47b896b77ec4a5be3ef1949c33ad393b6f45629921f326c279000bcf51bdb4af"
SCRIPT = Path(__file__).parent / "vendor" / "niivue.umd.js"


def fetch() -> Path:
    """Where NiiVue is, after npm has fetched it if need be."""
    if SCRIPT.is_file() and hashlib.sha256(SCRIPT.read_bytes()).hexdigest() == SHA256:
        return SCRIPT
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"{PACKAGE} was not fetched: there is no npm; install Node.js, then run `make viewer`")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            npm,
            "pack",
            PACKAGE,
            "--silent",
            "--ignore-scripts",
            "--fetch-retries=0",
            "--pack-destination",
            folder,
        ]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=60)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{PACKAGE} was not fetched within a minute; run `make viewer` where npm works"
            ) from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            reason = " ".join(done.stderr.split()) or "npm failed"
            raise RuntimeError(f"{PACKAGE} was not fetched: {reason}; run `make viewer` where npm works")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(MEMBER)
            content = b"" if member is None else member.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE} is not the file that was expected; its checksum differs")
    SCRIPT.parent.mkdir(exist_ok=True)
    temporary = SCRIPT.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(SCRIPT)
    return SCRIPT


if __name__ == "__main__":
    print(fetch())
