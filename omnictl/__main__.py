"""``omnictl``, also as ``python -m omnictl``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command of the command line; returns its exit code.

    The command line is imported here, where Ctrl-C while it loads is an interruption and no traceback."""
    try:
        from omnictl.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells have it


if __name__ == "__main__":
    sys.exit(main())
