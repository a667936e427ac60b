"""The stop signals of ``omnicore.supervise``, under the name by which this package's modules know them."""

from omnicore.supervise.signals import StopSignals, process_age_s

__all__ = ["StopSignals", "process_age_s"]
