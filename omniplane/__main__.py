"""``python -m omniplane`` is ``omniplane``."""

import sys

from omniplane.cli import main

sys.exit(main())
