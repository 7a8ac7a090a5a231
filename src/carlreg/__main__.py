"""`python -m carlreg` is `carl`."""

import sys

from carlreg.cli import main

sys.exit(main())
