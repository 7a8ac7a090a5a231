"""Take the screenshots of docs/images in Chromium from a folder that `carl demo` wrote.

python docs/screenshots.py carl-demo/pair
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import WEBGL, chromium  # noqa: E402

from carlreg.show import viewer  # noqa: E402


def main(folder: Path) -> None:
    with viewer.serve(folder) as server, chromium(*WEBGL) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, address in (("report", server.report_path or ""), ("view", "")):
            page.open(urljoin(server.url, address), width=1000, height=740)
            page.wait("document.body.dataset.ready === 'yes'")
            if name == "view":
                page.get("(byId('overlay').value = 'labels', byId('opacity').value = 35, changeOverlay())")
            page.settle()
            (ROOT / "docs" / "images" / f"{name}.png").write_bytes(page.png())
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
