from __future__ import annotations

import numpy as np
import pytest

from connectors import copying
from connectors.copying import copy

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB, 4 * MIB, 4 * MIB + 24, 9 * MIB - 8])
def test_every_byte_is_copied_and_none_beside(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 2**63, size // 8 + 1, dtype=np.int64)[: size // 8]
    around = np.zeros(len(source) + 16, np.int64)
    copy(around[8:-8], source)
    assert np.array_equal(around[8:-8], source)
    assert not around[:8].any()
    assert not around[-8:].any()


def test_shapes_strides_and_byte_orders_do_not_matter() -> None:
    source = np.arange(3 * 700_001, dtype=">f8").reshape(3, 700_001)
    for array in (source, source.T, source[:, ::-1]):
        target = np.empty(array.shape, "<f8")
        copy(target, array)
        assert np.array_equal(target, array)


def test_other_types_and_shapes_are_refused() -> None:
    large = np.zeros(MIB, np.int64)
    with pytest.raises(TypeError):
        copy(np.zeros(MIB, np.int32), large)
    with pytest.raises(ValueError, match="shape"):
        copy(np.zeros(MIB + 1, np.int64), large)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4 * MIB, 4 * MIB + 8, 64_000_000, 95 * MIB, 97 * MIB, 440_000_000])
@pytest.mark.parametrize("itemsize", [1, 8, 24])
def test_pieces_cover_everything_once(size: int, threads: int, itemsize: int) -> None:
    size -= size % itemsize
    pieces = list(copying._pieces(size, itemsize, threads))
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, size // itemsize)
    assert len(pieces) <= threads
