"""What an engine tells peers about itself or its memory, as bytes that a peer can check before its library sees them.

Libraries of transfer engines parse such bytes in native code, and their formats change between releases. So what goes
into a handle is sealed: library, version, the engine's name, what the library says, and a digest of it all. Guarantees:
bytes that were damaged on the way, or come from another version, never reach the library. Not guaranteed: that the
sender meant well; handles come from workers that the cluster has let in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import struct

from connectors.engines.base import RemoteRegion
from omnicore import errors

MAX_DESCRIPTOR_BYTES = 64 * 1024
"""As much as ``EngineBackend`` allows for each."""
_DIGEST_BYTES = 8  # against damage, not against forgery
_LENGTH = struct.Struct(">I")
_REGION = struct.Struct(">QQ")


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """One engine, or one region of it."""

    library: str
    """Name of the pip distribution."""
    version: str
    """Of that library. Peers need the same one."""
    name: str
    """The engine; unique among all engines that ever were."""
    content: bytes
    """What the library says, opaque."""

    def seal(self) -> bytes:
        """As bytes. Raises ``FailedPreconditionError`` if they are too long for a handle."""
        body = b"".join(
            _LENGTH.pack(len(part)) + part
            for part in (self.library.encode(), self.version.encode(), self.name.encode(), self.content)
        )
        sealed = _digest(body) + body
        if len(sealed) > MAX_DESCRIPTOR_BYTES:
            raise errors.FailedPreconditionError(
                f"{self.library} describes itself in {len(self.content)} bytes, a handle has room for "
                f"{MAX_DESCRIPTOR_BYTES}",
                reason="DESCRIPTOR_TOO_LONG",
                metadata={"library": self.library, "size_bytes": len(self.content)},
            )
        return sealed


@functools.lru_cache(maxsize=1024)  # every handle of a region brings the same bytes
def unseal(sealed: bytes, library: str, version: str) -> Descriptor:
    """What a peer sealed. Raises ``DataLossError`` for anything else and ``FailedPreconditionError`` for a peer with
    another library or version."""
    parts = _parts(sealed)
    texts = _texts(parts)
    if parts is None or texts is None:
        raise errors.DataLossError(
            f"{len(sealed)} bytes of a handle do not describe an engine of {library}: damaged, or something else",
            reason="BAD_HANDLE",
            metadata={"library": library, "size_bytes": len(sealed)},
        )
    descriptor = Descriptor(*texts, parts[3])
    if (descriptor.library, descriptor.version) != (library, version):
        raise errors.FailedPreconditionError(
            f"the peer has {descriptor.library} {descriptor.version}, this worker {library} {version}: they must match",
            reason="OTHER_VERSION",
            metadata={"peer": f"{descriptor.library} {descriptor.version}", "here": f"{library} {version}"},
        )
    return descriptor


def pack_region(address: int, size_bytes: int, rest: bytes) -> bytes:
    """Content of the descriptor of a region."""
    return _REGION.pack(address, size_bytes) + rest


def unpack_region(descriptor: Descriptor, remote: RemoteRegion) -> bytes:
    """``rest`` of a region's descriptor. Raises ``DataLossError`` if the handle places the region elsewhere."""
    if len(descriptor.content) < _REGION.size or _REGION.unpack_from(descriptor.content) != (
        remote.address,
        remote.size_bytes,
    ):
        raise errors.DataLossError(
            f"a handle has {remote.size_bytes} bytes at {remote.address:#x} of {descriptor.name!r}, which has them "
            f"elsewhere",
            reason="BAD_HANDLE",
            metadata={"library": descriptor.library},
        )
    return descriptor.content[_REGION.size :]


def _texts(parts: list[bytes] | None) -> tuple[str, str, str] | None:
    """Library, version and name; None for what is no text, which a digest does not keep anybody from sealing."""
    try:
        return None if parts is None else (parts[0].decode(), parts[1].decode(), parts[2].decode())
    except UnicodeDecodeError:
        return None


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _parts(sealed: bytes) -> list[bytes] | None:
    if not _DIGEST_BYTES < len(sealed) <= MAX_DESCRIPTOR_BYTES:
        return None
    body = sealed[_DIGEST_BYTES:]
    if _digest(body) != sealed[:_DIGEST_BYTES]:
        return None
    parts: list[bytes] = []
    start = 0
    while start + _LENGTH.size <= len(body):
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size + length
        parts.append(body[start - length : start])
    return parts if len(parts) == 4 and start == len(body) else None
