"""How this process and its peers prove who they are; every service has one ``Security``, made from its flags.

Either mutual TLS on every connection, or plaintext, which stays on loopback unless ``--insecure`` is said. With TLS the
server at the other end must bear the name of the role that is expected there (``worker.omniplane.internal``), whatever
its address: workers come and go on any host, and no other member of the cluster can pose as one. Certificates and
tokens are read anew when their files change.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import ssl
from collections.abc import Mapping, Sequence

import grpc
import grpc.aio

from omnicore import config, errors, rpc, tls
from omnicore.access import Role
from omnicore.authorize import Authorizer, CallContext
from omnicore.config import option
from omnicore.grpc_stream import Dial
from omnicore.log import get_logger
from omnicore.token_channel import TokenChannel
from omnicore.tokens import TokenFile

_log = get_logger(__name__)

_REMEDY = "give --tls-ca, --tls-cert and --tls-key, or say --insecure"


def _domain(value: str) -> None:
    labels = value.split(".")
    if not all(label and label.replace("-", "").isalnum() and label.isascii() for label in labels):
        raise ValueError(f"must be a DNS name such as omniplane.internal, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Mutual TLS between services (docs/security.md)"""

    tls_ca: str = option("", help="PEM file of the authorities that sign the cluster's certificates")
    tls_cert: str = option("", help="PEM file of our certificate, with the DNS name ROLE.DOMAIN of our role")
    tls_key: str = option("", help="PEM file of its private key")
    tls_domain: str = option("omniplane.internal", help="DOMAIN of the names by which roles are known", check=_domain)
    insecure: bool = option(False, help="allow plaintext gRPC also beyond loopback: anybody there can do anything")


class Security:
    """Credentials for the channels and servers of one process. Raises ``InvalidRequestError`` for files that do not
    serve, naming the flag."""

    def __init__(
        self,
        settings: SecurityConfig | None = None,
        *,
        serves: Role | None = None,
        token_flag: str = "--token-file",
        token_file: str = "",
    ) -> None:
        """``serves``: the role as a server, whose name the certificate must bear. ``token_file``, which the flag
        ``token_flag`` named, holds the token that calls to control planes carry."""
        settings = settings or SecurityConfig()
        self._domain = settings.tls_domain
        self._insecure = settings.insecure
        paths = {tls.CA: settings.tls_ca, tls.CERT: settings.tls_cert, tls.KEY: settings.tls_key}
        self._identity: tls.IdentityFiles | None = None
        if any(paths.values()):
            for flag, path in paths.items():
                if not path:
                    raise errors.InvalidRequestError.field(flag, f"required: {', '.join(paths)} go together")
            name = f"{serves}.{self._domain}" if serves is not None else ""
            self._identity = tls.IdentityFiles(settings.tls_ca, settings.tls_cert, settings.tls_key, name)
        self._callers: Authorizer | None = None
        if self._identity is not None:
            self._callers = Authorizer(tls_domain=self._domain, token_files={})
        self._token = TokenFile(token_flag, token_file) if token_file else None

    @property
    def encrypted(self) -> bool:
        """TLS is on."""
        return self._identity is not None

    @property
    def version(self) -> object:
        """Changes when the certificate does: channels made before then still show the former one."""
        return self._identity.current() if self._identity is not None else None

    # --- dialling ---------------------------------------------------------------------------------------------------

    def check_dial(self, flag: str, targets: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` if one of the addresses that ``flag`` gives may not be dialled in plaintext."""
        if self._identity is None:
            self.check_plaintext(flag, targets, _REMEDY)

    def check_plaintext(self, flag: str, targets: Sequence[str], remedy: str) -> None:
        """The same for a protocol that has TLS flags of its own, which are not given; ``remedy`` names them."""
        for target in targets:
            if not self._insecure and not is_loopback(target):
                raise errors.InvalidRequestError.field(
                    flag, f"plaintext only goes to loopback, and {target} is beyond it: {remedy}", reason="PLAINTEXT"
                )

    def channel(self, target: str, peer: Role, *, watched: bool = False) -> grpc.aio.Channel:
        """A channel to the ``peer`` at ``target`` ("host:port"); ``watched`` as ``rpc.channel`` has it.

        Raises ``FailedPreconditionError`` where that would be plaintext beyond loopback."""
        if self._identity is None:
            self._check_may(target, peer)
            channel = rpc.channel(target, watched=watched)
        else:
            credentials = self._identity.current().channel_credentials()
            channel = rpc.channel(target, credentials, f"{peer}.{self._domain}", watched=watched)
        if self._token is not None and peer is Role.CONTROL_PLANE:
            return TokenChannel(channel, self._token)
        return channel

    def to_control_plane(self, target: str) -> grpc.aio.Channel:
        """``channel`` to a control plane."""
        return self.channel(target, Role.CONTROL_PLANE)

    def to_worker(self, target: str) -> grpc.aio.Channel:
        """``channel`` to a worker."""
        return self.channel(target, Role.WORKER)

    def to_peer(self, target: str) -> grpc.aio.Channel:
        """``channel`` between workers, whose requests wait for each other's data: one that hangs is soon noticed."""
        return self.channel(target, Role.WORKER, watched=True)

    def dial_worker(self, target: str) -> Dial:
        """For a stream to a worker, on a connection of its own. Raises as ``channel`` does."""
        if self._identity is None:
            self._check_may(target, Role.WORKER)
            return Dial(target)
        return Dial(target, self._identity.current().client_context(), f"{Role.WORKER}.{self._domain}")

    # --- serving ----------------------------------------------------------------------------------------------------

    def check_listen(self, flag: str, address: str) -> None:
        """Raise ``InvalidRequestError`` if a server may not be at ``address``, which ``flag`` gives, in plaintext."""
        if not self._may(address):
            raise errors.InvalidRequestError.field(
                flag, f"plaintext is only served on loopback, and {address} is beyond it: {_REMEDY}", reason="PLAINTEXT"
            )
        if self._identity is None and not is_loopback(address):
            _log.warning("plaintext beyond loopback: anybody who can connect can do anything", address=address)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For ``rpc.serve``; None: plaintext."""
        return self._identity.server_credentials() if self._identity is not None else None

    def server_context(self) -> ssl.SSLContext | None:
        """For a ``StreamServer``, as the files are now; None: plaintext."""
        return self._identity.current().server_context() if self._identity is not None else None

    def interceptors(self, token_files: Mapping[Role, TokenFile] | None = None) -> tuple[rpc.Interceptor, ...]:
        """For ``rpc.serve``: checks every caller's role. Without TLS and tokens there is nothing to check."""
        if self._identity is None and not token_files:
            return ()
        domain = self._domain if self._identity is not None else ""
        return (Authorizer(tls_domain=domain, token_files=token_files or {}),)

    def check_caller(self, method: str, context: CallContext) -> None:
        """The same for a stream of a ``StreamServer``. Raises as ``Authorizer.check``."""
        if self._callers is not None:
            self._callers.check(method, context)

    def _check_may(self, target: str, peer: Role) -> None:
        if not self._may(target):
            raise errors.FailedPreconditionError(
                f"will not connect to {peer} {target} in plaintext, which is beyond loopback: {_REMEDY}",
                reason="PLAINTEXT",
                metadata={"address": target},
            )

    def _may(self, address: str) -> bool:
        return self._identity is not None or self._insecure or is_loopback(address)


def is_loopback(address: str) -> bool:
    """Whether "host:port", or a Unix socket, can only be this machine. Names are not looked up: but for "localhost"
    they may be anybody's."""
    if address.startswith("unix:"):
        return True
    host = config.split_host_port(address)[0].lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
