from __future__ import annotations

import pytest

from omnicore.errors import InvalidRequestError
from stage_worker.devices import narrowed


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        (["0", "1"], None, "0,1"),
        (["0"], "2,3", "2"),
        (["1"], "2,3", "3"),
        (["1", "0"], "GPU-a,GPU-b", "GPU-b,GPU-a"),
    ],
)
def test_logical_ids_are_positions_in_the_visible_set(devices: list[str], visible: str | None, expected: str) -> None:
    assert narrowed(devices, visible) == expected


@pytest.mark.parametrize(
    ("devices", "visible", "message"),
    [
        (["x"], None, "must be numbers, got 'x'"),
        (["0", "0"], None, "names a device twice"),
        (["2"], "2,3", "2 is outside the 2 devices that CUDA_VISIBLE_DEVICES=2,3 shows"),
        (["0"], "", "0 is outside the 0 devices"),
    ],
)
def test_wrong_ids_name_the_flag(devices: list[str], visible: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="--devices") as refused:
        narrowed(devices, visible)
    assert message in refused.value.message
