"""The port checks of ``omnicore.supervise``, under the name by which this package's modules know them."""

from omnicore.supervise.ports import check_free, check_reachable

__all__ = ["check_free", "check_reachable"]
