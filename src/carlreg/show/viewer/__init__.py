"""`carl view`: a result folder in the browser, its volumes linked by the transform."""

from carlreg.show.viewer.scene import Scene, load_scene
from carlreg.show.viewer.server import Server, open_browser, serve

__all__ = ["Scene", "Server", "load_scene", "open_browser", "serve"]
