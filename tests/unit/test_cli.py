"""``omniplane SERVICE``: how a service begins."""

from __future__ import annotations

import gc
import os

import pytest

from omniplane import cli

VARIABLE = "OPENBLAS_THREAD_TIMEOUT"


@pytest.mark.parametrize("given", ["", "20"], ids=["unset", "set"])
def test_a_start_leaves_the_other_processors_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """Threads of numpy's OpenBLAS that have nothing to do sleep, unless the operator wants otherwise."""
    monkeypatch.setenv(VARIABLE, given)
    if not given:
        monkeypatch.delenv(VARIABLE)
    with pytest.raises(SystemExit) as ended:
        cli.main(["stage-worker", "--help"])
    assert ended.value.code == 0
    assert "--stage-id" in capsys.readouterr().out
    assert os.environ[VARIABLE] == (given or "4")
    assert gc.isenabled()


def test_an_unknown_service_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stage-workers"]) == 2
    assert "unknown service 'stage-workers'" in capsys.readouterr().err
