from __future__ import annotations

import json
import logging

from nextstate.logs import JsonLines


def lines_of(log) -> list[dict]:
    written: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(JsonLines("server").format(record))

    logger = logging.Logger("nextstate.test")
    logger.addHandler(Keep())
    log(logger)
    return [json.loads(line) for line in written]


def test_a_line_is_one_object_with_what_it_is_about():
    [line] = lines_of(lambda log: log.warning("turn %d: \n no", 7, extra={"turn_id": 7, "unknown": 1}))
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "process": "server",
        "level": "warning",
        "logger": "nextstate.test",
        "message": "turn 7: \n no",
        "turn_id": 7,
    }


def test_a_traceback_is_a_field_of_the_same_line():
    def fail(log: logging.Logger) -> None:
        try:
            raise ValueError("seen")
        except ValueError:
            log.exception("it failed")

    [line] = lines_of(fail)
    assert line["message"] == "it failed"
    assert line["traceback"].endswith("ValueError: seen")
