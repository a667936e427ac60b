"""Structured logs: one event a line, ``event key=value …`` for people or JSON for machines.

INFO is for changes of state; anything per request is DEBUG. Secrets never enter a log: pass no tokens or passwords.
"""

from __future__ import annotations

import datetime
import logging
import sys

import orjson


class _Formatter(logging.Formatter):
    def __init__(self, service: str, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = getattr(record, "fields", {})
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            row: dict[str, object] = {
                "time": time,
                "level": record.levelname,
                "service": self._service,
                "event": record.getMessage(),
            }
            row |= {
                key: value if isinstance(value, int | float | bool) else str(value) for key, value in fields.items()
            }
            if error:
                row["error"] = error
            return orjson.dumps(row).decode()
        parts = [time, record.levelname[0], self._service, record.getMessage()]
        parts += [f"{key}={_quoted(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{error}" if error else line


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text


class Logger:
    """Writes events with fields: ``log.info("replica registered", stage=1, replica=0)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def wants_debug(self) -> bool:
        """Whether ``debug`` does anything: for where computing its fields costs something."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **fields: object) -> None:
        """Detail, per request or per step."""
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        """A change of state."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something that an operator may want to act on."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: object) -> None:
        """Something failed."""
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, **fields: object) -> None:
        """Something failed in a way that we did not expect; with the current traceback."""
        self._logger.exception(event, extra={"fields": fields})


def get_logger(name: str) -> Logger:
    """The logger of a module: pass ``__name__``."""
    return Logger(name)


def setup_logging(service: str, level: str = "info", as_json: bool = False) -> None:
    """Send the logs of this process to standard error. ``level``: debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service, as_json))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
