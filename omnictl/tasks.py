"""``omnicore.tasks``, under the name by which this package's modules know it."""

from omnicore.tasks import together

__all__ = ["together"]
