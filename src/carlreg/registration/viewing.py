"""`Registration.view()`: the viewer of `carl view`, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carlreg.errors import CarlError
from carlreg.files import images
from carlreg.files.checksums import sha256
from carlreg.files.choice import CHOICES
from carlreg.files.results import Request

if TYPE_CHECKING:
    from carlreg.registration.result import Registration


def _of_images(request: Request | None) -> Request | None:
    """The same of images from which nothing has to be chosen any more."""
    if request is None:
        return None
    return replace(request, options={**request.options, **dict.fromkeys(CHOICES)})


@dataclass(frozen=True, eq=False)
class Viewer:
    """A viewer that serves one result on this machine."""

    url: str
    process: Any
    folder: Any

    @classmethod
    def of(cls, result: Registration, *, browser: bool) -> Viewer:
        """Save a result and its two images to a temporary folder, and serve that."""
        folder = tempfile.TemporaryDirectory(prefix="carl-view-")
        inputs = dict(result.record.inputs)
        for name, image in (("fixed", result.fixed), ("moving", result.moving)):
            path = Path(folder.name) / f"{name}.nii.gz"
            images.write(image, path)
            inputs[name] = replace(inputs[name], path=str(path), sha256=sha256(path), given_as=None)
        kept = {name: one for name, one in inputs.items() if one.path is not None}
        record = replace(result.record, inputs=kept, request=_of_images(result.record.request))
        replace(result, record=record).save(Path(folder.name) / "result")
        words = [sys.executable, "-m", "carlreg", "view", f"{folder.name}/result"]
        words += [] if browser else ["--no-browser"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line.strip())
            if " at http" in line:
                return cls(line.partition(" at ")[2].split()[0], process, folder)
        folder.cleanup()
        raise CarlError(f"the viewer did not start: {' '.join(told[-1:])}")

    def close(self) -> None:
        """Stop the viewer and remove its files."""
        self.process.terminate()
        self.process.wait()
        self.process.stderr.close()
        self.folder.cleanup()

    def __repr__(self) -> str:
        return f"viewer at {self.url}, until close()"
