"""``python -m omnictl``."""

from __future__ import annotations

import sys

from omnictl.cli import main

sys.exit(main())
