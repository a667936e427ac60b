"""How the processes of one launcher prove who they are: one set of flags, a role for each."""

from __future__ import annotations

from omnicore.access import Role
from omnicore.security import Security, SecurityConfig
from omniplane.serve.config import ServeConfig

_ROLE = "{role}"
"""In --tls-cert and --tls-key it stands for the role, so that each process has its own certificate, as
``scripts/dev-certs`` names them. Without it, one certificate must bear the names of all roles."""


def security_flags(config: ServeConfig, role: Role) -> tuple[str, ...]:
    """The flags that make a service a ``role`` of this launcher's cluster."""
    settings = _settings(config, role)
    return (
        *(("--tls-ca", settings.tls_ca) if settings.tls_ca else ()),
        *(("--tls-cert", settings.tls_cert) if settings.tls_cert else ()),
        *(("--tls-key", settings.tls_key) if settings.tls_key else ()),
        *("--tls-domain", settings.tls_domain),
        *(("--insecure",) if settings.insecure else ()),
    )


def own_security(config: ServeConfig) -> Security:
    """The launcher's own: a head's puts pipelines into force, which an administrator does. Raises
    ``InvalidRequestError`` for files that do not serve, naming the flag."""
    role = Role.WORKER if config.headless else Role.ADMIN
    token_file = "" if config.headless else config.admin_token_file
    return Security(_settings(config, role), token_flag="--admin-token-file", token_file=token_file)


def worker_security(config: ServeConfig) -> Security:
    """That of the launcher's replicas, for what it does in the name of one that died."""
    token_file = config.registration_token_file
    return Security(_settings(config, Role.WORKER), token_flag="--registration-token-file", token_file=token_file)


def _settings(config: ServeConfig, role: Role) -> SecurityConfig:
    return SecurityConfig(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert.replace(_ROLE, role),
        tls_key=config.tls_key.replace(_ROLE, role),
        tls_domain=config.tls_domain,
        insecure=config.insecure,
    )
