"""What the simulated engine makes: words, tensors, tones and pictures, each a function of its input and seed. Pure.

Tests compare against these functions, so a chunk or an answer that went to the wrong request is noticed.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.payload import Payload
from omni.v1 import prompt_pb2
from omnicore.errors import DataLossError, InvalidRequestError
from stage_worker.engine import TokenChance, TokenLogprob

SAMPLE_RATE_HZ = 24_000
"""Of audio: what common speech models use."""
_LEXICON = tuple(
    re.findall(
        r"\w+",
        "the a small large quiet bright early late river mountain garden window machine signal teacher captain child "
        "winter summer morning story letter number village road bridge engine answer question makes finds keeps brings "
        "follows opens carries remembers builds leaves shows turns slowly quickly always never often again there here "
        "under over beside between without after before while because and",
    )
)
_WORD_IDS = {f" {word}": token_id for token_id, word in enumerate(_LEXICON)}
_PICTURE_PIXELS = 64
_PROMPT_OPTIONS = ("bot_task", "negative_prompt", "language")
_BYTE_TOKENS = 1000
"""Token ids from here on are single bytes, so that any text has tokens."""
_TENSOR_BLOCK_BYTES = 4096  # random bytes are made once per chunk and repeated: big chunks cost one memcpy
_AMPLITUDE = 0.3 * 32767  # audible, not loud


def prompt_text(prompt: prompt_pb2.Prompt) -> str:
    """A prompt as one text: turns on lines, media as its checksum, tokens as numbers."""
    kind = prompt.WhichOneof("kind")
    lines = [f"{name}: {value}" for name in _PROMPT_OPTIONS if (value := getattr(prompt, name))]
    if kind == "text":
        return "\n".join([*lines, prompt.text])
    if kind == "tokens":
        return "\n".join([*lines, " ".join(map(str, prompt.tokens.token_ids))])
    for message in prompt.chat.messages:
        parts = [
            part.text
            if part.WhichOneof("kind") == "text"
            else f"<{part.media.mime_type} {zlib.crc32(part.media.data):08x}>"
            for part in message.parts
        ]
        lines.append(f"{message.role}: {' '.join(parts)}")
    return "\n".join(lines)


def answer_tokens(source: str, seed: int) -> Iterator[tuple[int, str]]:
    """An endless answer to ``source``: token ids with their text. Sentences of 6 to 10 words; the first word is the
    checksum of ``source``."""
    rng = random.Random(f"{seed}|{source}")
    first = f"Answer-{zlib.crc32(source.encode()):08x}"
    left = rng.randint(6, 10)
    start = True
    word, token_id = first, len(_LEXICON)
    while True:
        left -= 1
        if start and word is not first:
            word = word.capitalize()
        yield token_id, ("" if word is first else " ") + word + ("." if left == 0 else "")
        start = left == 0
        if start:
            left = rng.randint(6, 10)
        token_id = rng.randrange(len(_LEXICON))
        word = _LEXICON[token_id]


def answer_text(source: str, seed: int, tokens: int) -> str:
    """The first ``tokens`` tokens of the answer to ``source``, as text."""
    stream = answer_tokens(source, seed)
    return "".join(next(stream)[1] for _ in range(tokens))


def chances(token_id: int, text: str, count: int) -> TokenLogprob:
    """How likely a token was: always the likeliest, before ``count - 1`` other words."""
    first = -(1 + token_id % 50) / 100
    taken = TokenChance(token_id, text.encode(), first)
    others = [(token_id + step) % len(_LEXICON) for step in range(1, count)]
    words = [TokenChance(i, f" {_LEXICON[i]}".encode(), first - rank) for rank, i in enumerate(others, 1)]
    return TokenLogprob(taken, [taken, *words] if count else [])


def tokens_of(text: str) -> tuple[list[int], list[str]]:
    """Ids and texts: known words with the space before them, and single bytes of all else."""
    ids: list[int] = []
    texts: list[str] = []
    for piece in re.findall(r" \w+|\w+|\W", text):
        known = _WORD_IDS.get(piece)
        if known is not None:
            ids.append(known)
            texts.append(piece)
        else:
            ids += [_BYTE_TOKENS + byte for byte in piece.encode()]
            texts += [f"<0x{byte:02X}>" for byte in piece.encode()]
    return ids, texts


def text_of(token_ids: Iterable[int]) -> str:
    """The text of tokens. Raises ``InvalidRequestError`` for ids that there are not."""
    data = bytearray()
    for index, token_id in enumerate(token_ids):
        if token_id < len(_LEXICON):
            data += f" {_LEXICON[token_id]}".encode()
        elif 0 <= token_id - _BYTE_TOKENS < 256:
            data.append(token_id - _BYTE_TOKENS)
        elif token_id == len(_LEXICON):
            data += b"Answer"
        else:
            raise InvalidRequestError.field(f"token_ids[{index}]", f"this model has no token {token_id}")
    return data.decode(errors="replace")


def payload_digest(payload: Payload) -> int:
    """CRC-32 over the content of a chunk."""
    if payload.text is not None:
        return zlib.crc32(payload.text.encode())
    crc = 0
    for name in sorted(payload.tensors):
        flat = np.ascontiguousarray(payload.tensors[name]).reshape(-1)
        crc = zlib.crc32(flat.view(np.uint8).data, crc)
    return crc


def checked_digest(payload: Payload) -> int:
    """The digest of ``payload``; where a simulated producer wrote one, raises ``DataLossError`` if it differs."""
    actual = payload_digest(payload)
    wanted = payload.metadata.get("crc32")
    if isinstance(wanted, int | float) and int(wanted) != actual:
        raise DataLossError(
            f"chunk checksum is {actual:08x}, its producer wrote {int(wanted):08x}", reason="CHECKSUM_MISMATCH"
        )
    return actual


def tensor_chunk(source: int, index: int, seed: int, size_bytes: int, with_checksum: bool) -> Payload:
    """A float32 vector made of ``source``, the digest of what it answers."""
    digits = hashlib.shake_128(b"%d|%d|%d" % (source, index, seed)).digest(_TENSOR_BLOCK_BYTES)
    block = (np.frombuffer(digits, "<u4") >> 8).astype(np.float32) * np.float32(2**-24)  # 0 to 1, as good as random
    whole, rest = divmod(max(1, size_bytes // 4), len(block))
    hidden = np.empty(whole * len(block) + rest, np.float32)
    hidden[: whole * len(block)].reshape(whole, len(block))[:] = block
    hidden[whole * len(block) :] = block[:rest]
    payload = Payload({"hidden": hidden})
    metadata: Mapping[str, Any] = {"source": source, "index": index}
    if with_checksum:
        metadata = {**metadata, "crc32": payload_digest(payload)}
    return Payload(payload.tensors, metadata=metadata)


def guided(source: int, role: str, digests: Iterable[int]) -> int:
    """What a picture is made of: ``source``, and then each companion's role with the digests of its chunks."""
    source = zlib.crc32(role.encode(), source)
    for digest in digests:
        source = zlib.crc32(digest.to_bytes(4, "big"), source)
    return source


def tone(source: int, seconds: float) -> npt.NDArray[np.int16]:
    """A mono tone of 220 to 880 Hz that ``source`` chooses, faded at both ends."""
    count, envelope = _time_and_volume(max(1, round(seconds * SAMPLE_RATE_HZ)))
    frequency_hz = 220 + source % 661
    wave = np.sin(2 * np.pi * frequency_hz / SAMPLE_RATE_HZ * count)
    wave *= envelope
    samples_i16: npt.NDArray[np.int16] = wave.astype("<i2")
    return samples_i16


@functools.lru_cache(maxsize=16)
def _time_and_volume(samples: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The numbers of that many samples, and how loud each is."""
    envelope = np.full(samples, _AMPLITUDE)
    fade = min(samples // 2, SAMPLE_RATE_HZ // 100)
    if fade:
        ramp = np.linspace(0, 1, fade)
        envelope[:fade] *= ramp
        envelope[-fade:] *= ramp[::-1]
    return np.arange(samples, dtype=np.float64), envelope


def picture(source: int, width: int = 0, height: int = 0) -> bytes:
    """A PNG of a gradient in colours that ``source`` chooses; 64 by 64 pixels where nothing is said."""
    width, height = width or _PICTURE_PIXELS, height or _PICTURE_PIXELS
    across, down = np.arange(width), np.arange(height)
    pixels = np.empty((height, width, 3), np.uint8)
    for channel in range(3):
        base = source >> (8 * channel) & 0xFF
        pixels[:, :, channel] = (base + down[:, None] * (channel + 1) + across[None, :]) % 256
    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each row begins with filter 0
    rows[:, 1:] = pixels.reshape(height, -1)

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bit RGB
    return (
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows.tobytes())) + part(b"IEND", b"")
    )
