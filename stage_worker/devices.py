"""Which accelerators this process sees. Pure: takes and returns environment values.

Device ids of a deploy file are logical: positions in the set that is visible to whoever starts the worker. An engine
library reads CUDA_VISIBLE_DEVICES when it is loaded, so the worker narrows it before any engine exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from omnicore.errors import InvalidRequestError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def narrowed(devices: Sequence[str], visible: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a worker that was given ``devices``.

    ``visible`` is the present value; None: every device of the machine is visible, so logical ids are physical ones.
    Raises ``InvalidRequestError`` for an id that is not a number, is given twice, or is outside the visible set.
    """
    for device in devices:
        if not device.isdecimal():
            raise InvalidRequestError.field("--devices", f"must be numbers, got {device!r}")
    if len(set(devices)) < len(devices):
        raise InvalidRequestError.field("--devices", f"names a device twice: {','.join(devices)}")
    if visible is None:
        return ",".join(devices)
    present = [part.strip() for part in visible.split(",") if part.strip()]
    for device in devices:
        if int(device) >= len(present):
            raise InvalidRequestError.field(
                "--devices", f"{device} is outside the {len(present)} devices that {VISIBLE_DEVICES}={visible} shows"
            )
    return ",".join(present[int(device)] for device in devices)
