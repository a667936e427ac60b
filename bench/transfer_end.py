"""One end of one path of ``bench.transfer``, as a process.

python -m bench.transfer_end produce|consume baseline|ours NAME MODE FD LARGEST OPTIONS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import uvloop

from bench import transfer_baselines, transfer_wire
from bench.transfer_wire import BlockingChannel, Channel, Consumer, LoopChannel, Producer
from omnicore import process
from omnicore.log import setup_logging


async def main(role: str, family: str, name: str, mode: str, fd: str, largest: str, options: str) -> None:
    channel: Channel
    end: Producer | Consumer
    if family == "baseline":
        channel, end = BlockingChannel(int(fd)), transfer_baselines.make(name, role, int(largest))
    else:
        from bench import transfer_ours  # seconds of imports that baselines can do without

        channel, end = LoopChannel(int(fd)), transfer_ours.make(name, mode, role, json.loads(options))
    if isinstance(end, Producer):
        await transfer_wire.produce(channel, end)
    else:
        await transfer_wire.consume(channel, end)


if __name__ == "__main__":
    process.die_with_parent()
    setup_logging("bench", "warning")
    if sys.argv[2] == "baseline":
        asyncio.run(main(*sys.argv[1:]))
    else:
        uvloop.run(main(*sys.argv[1:]))
    os._exit(0)  # engines of libraries end in their own time, or crash: nothing of theirs is measured any more
