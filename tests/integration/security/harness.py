"""Servers that have every service and do nothing: a caller who may call gets UNIMPLEMENTED."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio

import omni.v1
from omnicore import errors, rpc
from omnicore.access import Role
from omnicore.config import split_host_port
from omnicore.security import Security
from omnicore.tokens import TokenFile
from tests.support.certificates import DevCerts


def add_all(server: grpc.aio.Server) -> None:
    """Every service of the project, without any method."""
    for module in pkgutil.iter_modules(omni.v1.__path__):
        if not module.name.endswith("_service_pb2_grpc"):
            continue
        generated: Any = importlib.import_module(f"omni.v1.{module.name}")
        name = next(name for name in vars(generated) if name.endswith("Servicer") and not name.startswith("add_"))
        getattr(generated, f"add_{name}_to_server")(_Unimplemented(getattr(generated, name)), server)


class _Unimplemented:
    """Answers any method of ``servicer``, whatever it streams."""

    def __init__(self, servicer: type[Any]) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._servicer, name):
            raise AttributeError(name)

        def unimplemented(request: Any, context: rpc.ServicerContext) -> Any:
            raise errors.UnimplementedError(name)

        return unimplemented


@contextlib.asynccontextmanager
async def serving(security: Security, token_files: Mapping[Role, TokenFile] | None = None) -> AsyncIterator[str]:
    """Such a server on loopback; yields its address."""
    running = await rpc.serve(
        add_all,
        (),
        host="127.0.0.1",
        port=0,
        credentials=security.server_credentials(),
        interceptors=security.interceptors(token_files),
    )
    try:
        yield f"127.0.0.1:{running.port}"
    finally:
        await running.stop(0)


async def outcome(channel: grpc.aio.Channel, method: str) -> errors.OmniError:
    """How a call of ``method`` ("Service/Method" of omni.v1) with an empty message ends: with an error, always."""
    call: Any = channel.unary_unary(
        f"/omni.v1.{method}", request_serializer=lambda data: data, response_deserializer=lambda data: data
    )
    try:
        await call(b"", timeout=20)
    except grpc.aio.AioRpcError as error:
        return errors.from_rpc_error(error)
    raise AssertionError("a server without methods answered")


async def serial(address: str, certs: DevCerts, server_name: str) -> str:
    """Of the certificate that the server at ``address`` shows now; it must be for ``server_name``."""
    context = ssl.create_default_context(cafile=certs.path("ca.pem"))
    context.load_cert_chain(certs.path("client.pem"), certs.path("client.key"))
    host, port = split_host_port(address)
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=server_name)
    try:
        return str(writer.get_extra_info("peercert")["serialNumber"])
    finally:
        writer.close()
