"""The benchmark of transfers runs, small; its figures are not judged here."""

from __future__ import annotations

import pytest

from bench import transfer
from bench.transfer_paths import contenders
from bench.transfer_report import Bar, ratios

PATHS = ("memcpy", "shm_in_place")


@pytest.mark.timeout(180)  # four processes start one after the other
async def test_every_path_takes_its_turns_and_every_byte_is_right() -> None:
    wanted = [contender for contender in contenders(with_peers=False) if contender.key in PATHS]
    sizes = {label: transfer.size_bytes(label) for label in ("4KiB", "1MiB")}
    figures, missing, noise = await transfer.run(wanted, sizes, 2, "")
    assert missing == {}
    assert list(figures) == [(path, label) for label in sizes for path in PATHS]
    for cell in figures.values():
        assert len(cell.handed) == 2
        assert all(
            0 < put <= handed <= read for put, handed, read in zip(cell.put, cell.handed, cell.read, strict=True)
        )
    assert ratios(Bar("", PATHS[1], PATHS[0], None), "1MiB", figures) is not None
    assert noise.foreign_cores >= 0


def test_sizes_are_read_with_their_units() -> None:
    assert [transfer.size_bytes(label) for label in ("4KiB", "64MB", "440MB")] == [4096, 64_000_000, 440_000_000]
    for wrong in ("4", "4kib", "MB", "0KiB", "-1MB", "1.5MiB"):
        with pytest.raises(ValueError, match="sizes are like"):
            transfer.size_bytes(wrong)
