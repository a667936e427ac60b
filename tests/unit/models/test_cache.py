"""The model cache: built once by many, whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from omnicore.errors import DataLossError, UnavailableError
from stage_worker.models.cache import cache_dir, get_or_build


def test_where_the_cache_lies() -> None:
    assert cache_dir({"OMNI_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert cache_dir({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/omniplane")
    assert cache_dir({}) == Path.home() / ".cache" / "omniplane"


def test_an_entry_appears_whole_and_is_built_once(tmp_path: Path) -> None:
    calls = []

    def build(directory: Path) -> None:
        calls.append(directory)
        assert not (tmp_path / "model").exists()
        (directory / "weights").write_text("w")

    assert get_or_build(tmp_path, "model", build) == tmp_path / "model"
    assert get_or_build(tmp_path, "model", build) == tmp_path / "model"
    assert len(calls) == 1
    assert (tmp_path / "model" / "weights").read_text() == "w"


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise DataLossError("broken file")

    with pytest.raises(DataLossError):
        get_or_build(tmp_path, "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    get_or_build(tmp_path, "model", lambda directory: None)
    assert (tmp_path / "model").is_dir()


def test_what_a_killed_builder_left_is_swept(tmp_path: Path) -> None:
    orphan = tmp_path / ".model.tmp-dead"
    orphan.mkdir()
    (orphan / "half").write_text("x")
    get_or_build(tmp_path, "model", lambda directory: None)
    assert not orphan.exists()


def test_waiting_for_another_builder_is_bounded(tmp_path: Path) -> None:
    started, release = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        started.set()
        assert release.wait(150)

    thread = threading.Thread(target=get_or_build, args=(tmp_path, "model", slow))
    thread.start()
    try:
        assert started.wait(150)
        with pytest.raises(UnavailableError, match="another process"):
            get_or_build(tmp_path, "model", lambda directory: None, wait_s=0.2)
    finally:
        release.set()
        thread.join()
    assert (tmp_path / "model").is_dir()


def test_an_unwritable_cache_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="OMNI_CACHE_DIR"):
        get_or_build(tmp_path / "file", "model", lambda directory: None)


def _count_build(directory: Path) -> None:
    (directory / "pid").write_text(str(os.getpid()))
    with (directory.parent / "log").open("a") as log:
        log.write("built\n")


def test_several_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=get_or_build, args=(tmp_path, "model", _count_build)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"
