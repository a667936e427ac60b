"""Deploy files: YAML in, a validated and completed plan out.

Pure: no files, no network, no clock, no etcd. Only the control plane reads deploy files; gateways and workers get
the plan. ``docs/deploy-yaml.md`` is the reference of every key.
"""

from control_plane.deploy.plan import DeployResult, plan_pipeline

__all__ = ["DeployResult", "plan_pipeline"]
