"""Log lines, for people or for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

Form = Literal["text", "json"]

_ABOUT = ("turn_id", "version", "update_id")
"""What a line may be about: given as `extra`, it is a field of its own in JSON."""


def configure(form: Form, *, process: str) -> None:
    """Write lines to stderr from now on.

    Args:
        process: 'server' or 'trainer', as both write to one place.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(process)
        if form == "json"
        else logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("alembic", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """One object a line: at (ISO 8601, UTC), process, level, logger, message, what it is about, and the traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "process": self._process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _ABOUT if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
