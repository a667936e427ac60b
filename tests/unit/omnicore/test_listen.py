"""An address that cannot be listened at: named, with the reason and with what to do."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from omnicore.listen import cannot_listen


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            # As ``socket.create_server`` tells it, with the address once more.
            OSError(errno.EADDRINUSE, "Address already in use (while attempting to bind on address ('::1', 7700))"),
            "cannot listen on [::1]:7700: Address already in use; stop what listens there, or choose another port",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)),
            "cannot listen on [::1]:7700: Cannot assign requested address; choose an address of this machine",
        ),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "cannot listen on [::1]:7700: Name or service not known",
        ),
    ],
)
def test_the_reason_and_what_to_do(error: OSError, message: str) -> None:
    told = cannot_listen("::1", 7700, error)
    assert (told.message, told.reason, told.metadata) == (message, "ADDRESS_IN_USE", {"address": "[::1]:7700"})
