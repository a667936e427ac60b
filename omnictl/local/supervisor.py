"""The supervisor of ``omnicore.supervise``, under the name by which this package's modules know it."""

from omnicore.supervise.supervisor import Member, Spec, StartFailedError, State, Supervisor

__all__ = ["Member", "Spec", "StartFailedError", "State", "Supervisor"]
