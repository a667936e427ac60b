"""Who may call what, over real connections: every method with every role, tokens, and what refusals say and log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omnicore import access, rpc
from omnicore.access import Role
from omnicore.errors import OmniError, PermissionDeniedError, UnauthenticatedError, UnimplementedError
from omnicore.security import Security
from omnicore.tokens import TokenFile
from tests.contract.test_access import METHODS
from tests.integration.security.harness import outcome, serving
from tests.support.certificates import DevCerts

REGISTER, APPLY, READ = (
    "RegistryService/Register",
    "PipelineService/ApplyPipeline",
    "RegistryService/ListReplicas",
)


def server_tokens(certs: DevCerts) -> dict[Role, TokenFile]:
    """As a control plane with both flags has them."""
    return {
        Role.WORKER: TokenFile("--registration-token-file", certs.path("registration.token")),
        Role.ADMIN: TokenFile("--admin-token-file", certs.path("admin.token")),
    }


async def outcomes(channel: grpc.aio.Channel, *methods: str) -> list[type[OmniError]]:
    return [type(await outcome(channel, method)) for method in methods]


@pytest.mark.parametrize("role", [*Role, "etcd"])
async def test_every_method_by_certificate(certs: DevCerts, role: str) -> None:
    mine = Role.CLIENT if role == "etcd" else Role(role)  # a certificate without a role is a client's
    async with (
        serving(Security(certs.settings("control-plane"), serves=Role.CONTROL_PLANE)) as address,
        Security(certs.settings(role)).to_control_plane(address) as channel,
    ):
        for method in sorted(METHODS):
            allowed = access.allowed(method)
            error = await outcome(channel, method.removeprefix("omni.v1."))
            if mine in allowed:
                assert isinstance(error, UnimplementedError), (method, error)
                continue
            assert isinstance(error, PermissionDeniedError), (method, error)
            assert error.reason == "ROLE_REQUIRED"
            assert error.metadata["certificate"] == role
            assert mine in error.message
            for needed in allowed:
                assert needed in error.message


async def test_an_admin_is_one_by_certificate_or_by_token(certs: DevCerts) -> None:
    server = Security(certs.settings("control-plane"), serves=Role.CONTROL_PLANE)
    async with serving(server, server_tokens(certs)) as address:
        with_token = Security(certs.settings("client"), token_file=certs.path("admin.token"))
        for security, expected in (
            (Security(certs.settings("admin")), UnimplementedError),
            (with_token, UnimplementedError),
            (Security(certs.settings("client")), PermissionDeniedError),
            (Security(certs.settings("client"), token_file=certs.path("registration.token")), PermissionDeniedError),
        ):
            async with security.to_control_plane(address) as channel:
                assert await outcomes(channel, APPLY, READ) == [expected, UnimplementedError]


async def test_a_worker_needs_its_certificate_and_a_token(certs: DevCerts, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("0123456789abcdef" * 4)
    server = Security(certs.settings("control-plane"), serves=Role.CONTROL_PLANE)
    async with serving(server, server_tokens(certs)) as address:
        for role, token, expected, reason in (
            ("worker", certs.path("registration.token"), UnimplementedError, "UNIMPLEMENTED"),
            ("worker", "", UnauthenticatedError, "TOKEN_REQUIRED"),
            ("worker", str(wrong), UnauthenticatedError, "TOKEN_UNKNOWN"),
            ("worker", certs.path("admin.token"), PermissionDeniedError, "ROLE_REQUIRED"),
            ("gateway", certs.path("registration.token"), PermissionDeniedError, "ROLE_REQUIRED"),
            ("admin", "", PermissionDeniedError, "ROLE_REQUIRED"),
        ):
            security = Security(certs.settings(role), token_file=token)
            async with security.to_control_plane(address) as channel:
                for method in (REGISTER, "RegistryService/Heartbeat", "RegistryService/Deregister"):
                    error = await outcome(channel, method)
                    assert (type(error), error.reason) == (expected, reason), (role, method)
                    for name in ("registration", "admin"):
                        assert certs.token(name) not in error.message
                    assert "0123456789abcdef" not in error.message


async def test_tokens_alone_guard_a_plaintext_loopback(certs: DevCerts, tmp_path: Path) -> None:
    """Whoever is on this machine may read and watch; to register, or to change something, takes a token."""
    expected: Mapping[str, list[type[OmniError]]] = {
        "": [UnauthenticatedError, UnauthenticatedError, UnimplementedError],
        certs.path("registration.token"): [UnimplementedError, PermissionDeniedError, UnimplementedError],
        certs.path("admin.token"): [PermissionDeniedError, UnimplementedError, UnimplementedError],
    }
    async with serving(Security(), server_tokens(certs)) as address:
        for token, outcome_types in expected.items():
            async with Security(token_file=token).to_control_plane(address) as channel:
                assert await outcomes(channel, REGISTER, APPLY, READ) == outcome_types
        stranger = tmp_path / "stranger.token"
        stranger.write_text("x" * 40)
        async with Security(token_file=str(stranger)).to_control_plane(address) as channel:
            assert await outcomes(channel, REGISTER, APPLY, READ) == [
                UnauthenticatedError,
                UnauthenticatedError,
                UnimplementedError,
            ]


async def test_without_tokens_and_tls_nothing_is_checked() -> None:
    async with serving(Security()) as address, Security().to_control_plane(address) as channel:
        assert await outcomes(channel, REGISTER, APPLY, READ) == [UnimplementedError] * 3


async def test_the_standard_services(certs: DevCerts) -> None:
    """Health is everybody's, also without a token; channelz tells who is connected: that is an administrator's."""
    request = channelz_pb2.GetServersRequest()
    async with serving(Security(), server_tokens(certs)) as address:
        async with Security().to_control_plane(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channelz_pb2_grpc.ChannelzStub(channel).GetServers(request)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with Security(token_file=certs.path("admin.token")).to_control_plane(address) as channel:
            assert (await channelz_pb2_grpc.ChannelzStub(channel).GetServers(request)).server


async def test_refusals_are_logged_without_the_token_and_not_without_end(
    certs: DevCerts, caplog: pytest.LogCaptureFixture
) -> None:
    security = Security(certs.settings("client"), token_file=certs.path("registration.token"))
    server = Security(certs.settings("control-plane"), serves=Role.CONTROL_PLANE)
    with caplog.at_level(logging.DEBUG):
        async with serving(server, server_tokens(certs)) as address, security.to_control_plane(address) as channel:
            for _ in range(50):
                await outcome(channel, APPLY)
    refusals = [record for record in caplog.records if record.getMessage() == "call refused"]
    assert refusals
    assert len(refusals) < 50, "at most one a second"
    fields = vars(refusals[0])["fields"]
    assert fields["certificate"] == "client"
    assert fields["method"] == f"/omni.v1.{APPLY}"
    assert all(certs.token("registration") not in str(vars(record)) for record in caplog.records)


async def test_the_token_goes_to_control_planes_only(certs: DevCerts) -> None:
    """A gateway or a worker that was taken over must not learn an administrator's token."""
    seen: list[str] = []

    class Listening(rpc.Interceptor):
        async def intercept_service(self, continuation, handler_call_details):  # type: ignore[no-untyped-def]
            seen.extend(str(value) for key, value in handler_call_details.invocation_metadata if key == "authorization")
            return await continuation(handler_call_details)

    running = await rpc.serve(lambda server: None, (), host="127.0.0.1", port=0, interceptors=(Listening(),))
    try:
        security = Security(token_file=certs.path("admin.token"))
        address = f"127.0.0.1:{running.port}"
        for peer in (Role.GATEWAY, Role.WORKER):
            async with security.channel(address, peer) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert not seen
        async with security.to_control_plane(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert seen == [f"Bearer {certs.token('admin')}"]
    finally:
        await running.stop(0)
