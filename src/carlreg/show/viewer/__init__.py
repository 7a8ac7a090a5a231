"""`carl view`: a registration's folder in the browser, its volumes linked by its transform."""

from carlreg.show.viewer.scene import Scene, find
from carlreg.show.viewer.server import Server, open_browser, serve

__all__ = ["Scene", "Server", "find", "open_browser", "serve"]
