"""A collector of traces that takes spans by OTLP and forgets them: what a traced service under a benchmark talks to.

    python -m bench.trace_sink --ready-file FILE

FILE gets its address as JSON, as services do it.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from omnicore import process


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 -- the name in the proto
        return trace_service_pb2.ExportTraceServiceResponse()


async def _serve(ready_file: str) -> None:
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Sink(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process.write_ready_file(ready_file, {"address": f"127.0.0.1:{port}"})
    await server.wait_for_termination()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-file", required=True)
    options = parser.parse_args()
    process.die_with_parent()
    asyncio.run(_serve(options.ready_file))


if __name__ == "__main__":
    main()
