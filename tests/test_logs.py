"""Log lines: what they say, and what they must never hold."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from app import logs
from app.settings import Settings, load_settings

ACCESS_FIELDS = {
    "request_id": "5f0c",
    "method": "POST",
    "path": "/ahp/uploads",
    "status": 201,
    "bytes": 123456,
    "seconds": 0.0123,
    "principal": "alice",
    "code": None,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Leave the process's loggers as they were found."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    names = ("consignee", "uvicorn.error")
    levels = {name: logging.getLogger(name).level for name in names}
    costs = (logging.logThreads, logging.logProcesses, logging.logMultiprocessing)
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = costs


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def settings(log_format: Literal["json", "text"] = "json", log_level: str = "info") -> Settings:
    return load_settings(implicit_file=False, log_format=log_format, log_level=log_level)


def lines_of(output: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def failing_with(message: str) -> BaseException:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


def test_a_request_is_one_json_object_on_one_line(output: io.StringIO) -> None:
    logs.configure(settings(), output)
    logging.getLogger(logs.ACCESS).info("request", extra=ACCESS_FIELDS)
    (line,) = lines_of(output)
    time = line.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert line == {
        "level": "info",
        "logger": "consignee.access",
        "message": "request",
        "request_id": "5f0c",
        "method": "POST",
        "path": "/ahp/uploads",
        "status": 201,
        "bytes": 123456,
        "seconds": 0.0123,
        "principal": "alice",
    }


@pytest.mark.requirement("AHP-R14", "AHP-R50")
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_path_cannot_forge_a_line(
    output: io.StringIO, log_format: Literal["json", "text"]
) -> None:
    logs.configure(settings(log_format), output)
    path = "/a\r\nforged\x1b[2J\x85\u2028\ud800/ü"
    logging.getLogger(logs.ACCESS).info("request", extra=ACCESS_FIELDS | {"path": path})
    text = output.getvalue()
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "forged" in text


@pytest.mark.requirement("AHP-R14")
@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("field", ["authorization", "token", "body", "headers", "query_string"])
def test_fields_that_could_hold_a_secret_are_left_out(
    output: io.StringIO, log_format: Literal["json", "text"], field: str
) -> None:
    logs.configure(settings(log_format), output)
    for name in (logs.ACCESS, "consignee.store"):
        logging.getLogger(name).info("event", extra={field: "s3cret", "principal": "seen"})
    assert "s3cret" not in output.getvalue()
    assert "seen" in output.getvalue()


@pytest.mark.requirement("AHP-R14")
@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("value", ["Bearer s3cret.x", "bearer  s3cret", "Basic czNjcmV0s3cret=="])
def test_an_authorization_value_is_withheld_wherever_it_turns_up(
    output: io.StringIO, log_format: Literal["json", "text"], value: str
) -> None:
    logs.configure(settings(log_format), output)
    error = failing_with(f"Illegal header value b'{value}'")
    logging.getLogger("consignee.auth").error("refused %s", value, exc_info=error)
    assert "s3cret" not in output.getvalue()
    assert output.getvalue().count("[withheld]") == 2


def test_a_traceback_is_one_field_of_the_json_line(output: io.StringIO) -> None:
    logs.configure(settings(), output)
    logging.getLogger("consignee.error").error("failed", exc_info=failing_with("oops"))
    (line,) = lines_of(output)
    assert line["level"] == "error"
    assert line["exception"].endswith("RuntimeError: oops")


def test_values_that_json_does_not_know_are_shown_as_text(output: io.StringIO) -> None:
    logs.configure(settings(), output)
    logging.getLogger("consignee.store").info("opened", extra={"at": Path("x") / "y"})
    assert lines_of(output)[0]["at"] == str(Path("x") / "y")


def test_lines_of_other_libraries_take_the_same_form_from_warnings_on(
    output: io.StringIO,
) -> None:
    logs.configure(settings(), output)
    logging.getLogger("uvicorn.error").info("Started server process [1]")
    logging.getLogger("uvicorn.error").warning(
        "Invalid HTTP request received.", extra={"color_message": "again"}
    )
    (line,) = lines_of(output)
    assert line.pop("time")
    assert line == {
        "level": "warning",
        "logger": "uvicorn.error",
        "message": "Invalid HTTP request received.",
    }


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("error", 1)])
def test_the_configured_level_is_the_least_that_is_written(
    output: io.StringIO, level: str, seen: int
) -> None:
    logs.configure(settings(log_level=level), output)
    logger = logging.getLogger("consignee.any")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("event")
    assert len(lines_of(output)) == seen


def test_a_second_call_replaces_the_first_and_nothing_else(output: io.StringIO) -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    earlier = io.StringIO()
    logs.configure(settings(), earlier)
    logs.configure(settings(), output)
    logging.getLogger("consignee").info("event")
    assert earlier.getvalue() == ""
    assert len(lines_of(output)) == 1
    assert other in logging.getLogger().handlers


def test_standard_error_is_the_default() -> None:
    assert logs.configure(settings()).stream is sys.stderr


def test_text_for_a_person_shows_a_request_at_a_glance(output: io.StringIO) -> None:
    logs.configure(settings("text"), output)
    refused = ACCESS_FIELDS | {"status": 413, "code": "too_large"}
    logging.getLogger(logs.ACCESS).info("request", extra=refused)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  POST  /ahp/uploads  413  123,456 bytes  12\.3 ms  too_large  alice\n",
        output.getvalue(),
    )


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_record_made_for_a_request_is_written_as_one_that_a_logger_makes(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch, log_format: Literal["json", "text"]
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.25)
    logs.configure(settings(log_format), output)
    logging.getLogger(logs.ACCESS).info("request", extra=ACCESS_FIELDS)
    logging.getLogger(logs.ACCESS).handle(logs.RequestLine(time.time(), **ACCESS_FIELDS))
    as_ever, line = output.getvalue().splitlines()
    assert line == as_ever


def test_the_record_made_for_a_request_has_what_handlers_of_others_look_for() -> None:
    record = logs.RequestLine(1_800_000_000.25, **ACCESS_FIELDS)
    assert {name for name in vars(logging.makeLogRecord({})) if not hasattr(record, name)} == set()
    assert (record.created, record.msecs) == (1_800_000_000.25, 250)
    shown = logging.Formatter("%(levelname)s %(name)s %(message)s %(status)s").format(record)
    assert shown == "INFO consignee.access request 201"


class Counting(io.StringIO):
    """A stream that keeps each write, and can be out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.is_broken = False

    def write(self, text: str) -> int:
        if self.is_broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writes.append(text)
        return len(text)


def said(*writes: str) -> list[list[str]]:
    """The messages of each write."""
    return [[json.loads(line)["message"] for line in text.splitlines()] for text in writes]


def test_gathered_lines_leave_in_one_write_and_in_their_order() -> None:
    output = Counting()
    logs.configure(settings(), output)
    log = logging.getLogger("consignee.store")
    log.info("before")
    with logs.gathered():
        log.info("first")
        log.info("second")
    log.info("behind")
    assert said(*output.writes) == [["before"], ["first", "second"], ["behind"]]


def test_gathered_lines_leave_also_when_the_block_fails() -> None:
    output = Counting()
    logs.configure(settings(), output)

    def write_and_fail() -> None:
        with logs.gathered():
            logging.getLogger("consignee.store").info("first")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert said(*output.writes) == [["first"]]


def test_where_nothing_is_gathered_nothing_is_written() -> None:
    output = Counting()
    logs.configure(settings(), output)
    with logs.gathered():
        pass
    assert output.writes == []


def test_gathered_lines_that_cannot_be_written_hurt_nobody_and_are_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = Counting()
    logs.configure(settings(), output)
    log = logging.getLogger("consignee.store")
    with logs.gathered():
        log.info("first")
        output.is_broken = True
    assert "lines of requests are lost" in capsys.readouterr().err
    output.is_broken = False
    log.info("second")
    assert said("".join(output.writes)) == [["second"]]


def test_a_stream_that_is_closed_fails_nobody_who_gathers_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = io.StringIO()
    logs.configure(settings(), output)
    output.close()
    with logs.gathered():
        pass
    with logs.gathered():
        logging.getLogger("consignee.store").info("first")
    assert "lines of requests are lost" in capsys.readouterr().err


def test_a_request_that_was_never_answered_is_still_shown(output: io.StringIO) -> None:
    logs.configure(settings("text"), output)
    logging.getLogger(logs.ACCESS).info("request", extra={"method": "GET", "path": "/"})
    assert output.getvalue()[10:] == "GET  /  -\n"


def test_text_of_an_event_shows_its_fields_and_its_traceback(output: io.StringIO) -> None:
    logs.configure(settings("text"), output)
    logging.getLogger("consignee.store").info("swept", extra={"expired": 2})
    logging.getLogger("consignee.store").error("failed", exc_info=failing_with("oops"))
    swept, failed, *traceback = output.getvalue().splitlines()
    assert swept.endswith("  swept expired=2")
    assert failed.endswith("  error: failed")
    assert traceback[-1] == "RuntimeError: oops"


@pytest.mark.parametrize(
    ("status", "colour"), [(201, 32), (304, 32), (404, 33), (503, 31), (None, 33)]
)
def test_colours_are_for_terminals(status: int | None, colour: int) -> None:
    terminal = Terminal()
    logs.configure(settings("text"), terminal)
    logging.getLogger(logs.ACCESS).info("request", extra=ACCESS_FIELDS | {"status": status})
    assert f"\x1b[{colour}m{status or '-'}\x1b[0m" in terminal.getvalue()


@pytest.mark.parametrize(("level", "colour"), [(logging.WARNING, 33), (logging.ERROR, 31)])
def test_trouble_stands_out_on_a_terminal(level: int, colour: int) -> None:
    terminal = Terminal()
    logs.configure(settings("text"), terminal)
    logging.getLogger("consignee.store").log(level, "trouble")
    assert f"\x1b[{colour}m" in terminal.getvalue()
