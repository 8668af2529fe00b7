"""`python -m octavo_router` is `octavo-router`."""

from __future__ import annotations

import sys

from octavo_router.main import main

sys.exit(main())
