from __future__ import annotations

import hashlib

import pytest

from connectors.engines.descriptor import Descriptor, unseal
from omnicore import errors


def test_what_was_sealed_is_found_again() -> None:
    made = Descriptor("lib", "1.2", "engine-1", b"opaque")
    assert unseal(made.seal(), "lib", "1.2") == made


@pytest.mark.parametrize("part", ["lib", "1.2", "engine-1"])
def test_parts_that_are_no_text_are_a_bad_handle_although_their_digest_is_right(part: str) -> None:
    sealed = Descriptor("lib", "1.2", "engine-1", b"opaque").seal()
    size = len(sealed) - len(b"".join(_body(sealed)))
    body = sealed[size:].replace(part.encode(), b"\xff" * len(part))
    forged = hashlib.blake2b(body, digest_size=size).digest() + body
    with pytest.raises(errors.DataLossError) as caught:
        unseal(forged, "lib", "1.2")
    assert caught.value.reason == "BAD_HANDLE"


def _body(sealed: bytes) -> list[bytes]:
    """The part of ``sealed`` whose digest stands before it."""
    for size in range(1, 65):
        if hashlib.blake2b(sealed[size:], digest_size=size).digest() == sealed[:size]:
            return [sealed[size:]]
    raise AssertionError("no digest")
