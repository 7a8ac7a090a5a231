"""Puts NiiVue into a wheel, and into a source checkout that is installed with `pip install -e`."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ViewerHook(BuildHookInterface):
    """Without npm or a network the package is built all the same; `carl view` then says what to do."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            runpy.run_path(str(Path(self.root) / "src/carlreg/show/viewer/fetch.py"))["fetch"]()
        except (RuntimeError, OSError) as error:
            self.app.display_warning(f"built without the viewer: {error}")
