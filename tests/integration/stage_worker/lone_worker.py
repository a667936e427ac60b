"""A worker in a process of its own, which no control plane knows: ``python -m … READY STAGE PLAN``, with the ready file
to write and the pipeline as protobuf JSON. Ends when it is killed, or with its parent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.process import die_with_parent, write_ready_file
from tests.integration.stage_worker.cluster import local_worker


async def _serve(ready: Path, stage_id: int, plan: pipeline_pb2.Pipeline) -> None:
    async with local_worker(plan, stage_id) as worker:
        replica = json_format.MessageToDict(worker.identity.current)
        write_ready_file(str(ready), {"endpoint": worker.identity.endpoint, "replica": replica})
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), json_format.Parse(sys.argv[3], pipeline_pb2.Pipeline())))
