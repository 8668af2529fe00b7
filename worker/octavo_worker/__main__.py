"""`python -m octavo_worker`: the same as the program `octavo-worker`."""

from __future__ import annotations

import sys

from octavo_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
