"""One principal at a server, as a client sees it; everything that the server says is judged.

Whatever comes back is held against what the protocol asks of every answer: the version header,
the envelope with its five keys and a code of the closed table, and the published JSON Schema of
the body or of each event. A path without a known shape fails, so that none is forgotten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.processes import RunningServer, running_server
from tests.uhp.schema import validate

SECONDS = 60
"""Long enough for a busy machine: it keeps a test from hanging, nothing is measured by it."""

TERMINAL = frozenset({"completed", "failed", "incomplete", "cancelled"})
TERMINAL_EVENTS = frozenset({"response.completed", "response.failed", "response.incomplete"})

CODES: Mapping[str, tuple[int, str]] = {
    "unsupported_protocol_version": (400, "invalid_request_error"),
    "invalid_input": (400, "invalid_request_error"),
    "harness_not_found": (404, "invalid_request_error"),
    "response_not_found": (404, "invalid_request_error"),
    "session_not_found": (404, "invalid_request_error"),
    "file_not_found": (404, "invalid_request_error"),
    "session_expired": (404, "invalid_request_error"),
    "harness_mismatch": (409, "invalid_request_error"),
    "session_busy": (409, "invalid_request_error"),
    "file_too_large": (413, "invalid_request_error"),
    "model_unavailable": (422, "invalid_request_error"),
    "unsupported_base": (422, "invalid_request_error"),
    "missing_credential": (401, "authentication_error"),
    "invalid_credential": (401, "authentication_error"),
    "insufficient_scope": (403, "permission_error"),
    "rate_limited": (429, "rate_limit_error"),
    "quota_exhausted": (429, "rate_limit_error"),
    "harness_unavailable": (503, "server_error"),
    "preview_unavailable": (501, "server_error"),
    "preview_failed": (502, "server_error"),
}
"""The closed table of the Errors chapter, section 3; every other code has a vendor's prefix."""

OWN_CODE = re.compile(r"consignee_[a-z_]+")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream, and how many seconds after the request it came."""

    kind: str
    data: dict[str, Any]
    after: float


class Peer:
    """A client with one token. Methods raise AssertionError for answers against the protocol."""

    def __init__(self, base_url: str, token: str | None, **options: Any) -> None:
        self.base_url = base_url
        self.token = token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        options = {"trust_env": False, "timeout": SECONDS} | options
        self.http = httpx.Client(base_url=base_url, headers=headers, **options)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any request; its answer, judged."""
        answer = self.http.request(method, path, **options)
        judge(method, path, answer)
        return answer

    def get(self, path: str, **options: Any) -> Any:
        """The JSON of a GET that succeeds."""
        return self._json("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of a POST that succeeds."""
        return self._json("POST", path, json=body, **options)

    def delete(self, path: str) -> Any:
        """The JSON of a DELETE that succeeds."""
        return self._json("DELETE", path)

    def _json(self, method: str, path: str, **options: Any) -> Any:
        answer = self.ask(method, path, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def refused(
        self, status: int, code: str, method: str, path: str, **options: Any
    ) -> dict[str, Any]:
        """The error of a request that must fail in this way."""
        answer = self.ask(method, path, **options)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert error["code"] == code
        return error

    def run(self, task: Any, **fields: Any) -> dict[str, Any]:
        """A task's response, once it has ended (unless `background` is asked for)."""
        response: dict[str, Any] = self.post("/v1/responses", {"input": task, **fields})
        return response

    def follow(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """The response of a task that runs in the background, once it has ended."""
        deadline = monotonic() + SECONDS
        while (now := self.get(f"/v1/responses/{response['id']}"))["status"] not in TERMINAL:
            assert monotonic() < deadline, "the task does not end"
            sleep(0.05)
        found: dict[str, Any] = now
        return found

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[Iterator[Event]]:
        """The events of a stream as they come, each judged."""
        began = monotonic()
        with self.http.stream(method, path, **options) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["uhp-version"]
            assert "content-encoding" not in answer.headers
            yield _events(answer, began)

    def events(self, task: Any, **fields: Any) -> list[Event]:
        """All events of a task that streams."""
        body = {"input": task, "stream": True, **fields}
        with self.stream("POST", "/v1/responses", json=body) as events:
            return list(events)

    def upload(self, name: str, content: bytes, media_type: str = "text/plain") -> dict[str, Any]:
        """An uploaded file."""
        part = (name, content, media_type)
        answer = self.ask("POST", "/v1/files", files={"file": part}, data={"purpose": "user_data"})
        assert answer.status_code == 200, answer.text
        file: dict[str, Any] = answer.json()
        return file

    def artifacts(self, response: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The listing of the session that a response belongs to."""
        files: list[dict[str, Any]] = self.get(f"/v1/sessions/{session_of(response)}/files")[
            "files"
        ]
        return files

    def content(self, file: Mapping[str, Any], **options: Any) -> httpx.Response:
        """The download of an artifact."""
        return self.ask("GET", content_path(file), **options)


@dataclass(frozen=True, slots=True)
class Site:
    """A running server with two principals that have nothing in common."""

    server: RunningServer
    alice: Peer
    bob: Peer


@contextmanager
def running_site(
    *arguments: str, environment: Mapping[str, str] | None = None, base_url: str | None = None
) -> Iterator[Site]:
    """`consignee dev ARGUMENTS…` and a client for each of its two tokens."""
    tokens = ("--token", "alice=alice-token", "--token", "bob=bob-token")
    with running_server(*tokens, *arguments, environment=environment) as server:
        url = base_url or server.uhp_base_url
        with Peer(url, "alice-token") as alice, Peer(url, "bob-token") as bob:
            yield Site(server, alice, bob)


def session_of(response: Mapping[str, Any]) -> str:
    """The id of a response's session."""
    session_id: str = response["metadata"]["session_id"]
    return session_id


def content_path(file: Mapping[str, Any]) -> str:
    """Where an artifact is downloaded."""
    return f"/v1/containers/{file['container_id']}/files/{file['id']}/content"


def text_of(response: Mapping[str, Any]) -> str:
    """What the assistant said."""
    return "".join(part["text"] for part in _parts(response))


def citations_of(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The artifacts that the assistant's messages cite."""
    return [annotation for part in _parts(response) for annotation in part["annotations"]]


def _parts(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return [part for message in messages for part in message["content"]]


def _events(answer: httpx.Response, began: float) -> Iterator[Event]:
    pending = ""
    for text in answer.iter_text():
        pending += text
        while "\n\n" in pending:
            frame, _, pending = pending.partition("\n\n")
            if not frame.startswith(":"):
                yield _event(frame, monotonic() - began)
    assert pending == "", "the stream ends within an event"


def _event(frame: str, after: float) -> Event:
    """One event; its lines and its payload must say the same."""
    fields = dict(line.split(": ", 1) for line in frame.split("\n"))
    data = json.loads(fields["data"])
    validate("Event", data)
    if "response" in data:
        judge_response(data["response"])
    assert fields["event"] == data["type"]
    assert fields["id"] == str(data["sequence_number"])
    return Event(data["type"], data, after)


# --- judging ------------------------------------------------------------------------------------


def judge(method: str, path: str, answer: httpx.Response) -> None:
    """Hold an answer against what the protocol asks of every one (V-01, E-01, UHP-31, B19)."""
    assert answer.headers["uhp-version"] in ("2026-08-11", "2026-09-12")
    assert answer.headers["x-content-type-options"] == "nosniff"
    if method == "HEAD" or answer.status_code == 304:
        assert answer.content == b""
    elif not answer.is_success:
        judge_error(answer)
    elif not _is_raw(method, path):
        assert answer.headers["content-type"] == "application/json"
        _judge_body(method, urlsplit(path).path, answer.json())


def judge_error(answer: httpx.Response) -> None:
    """The envelope, and a code that the table gives this status."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    validate("ErrorEnvelope", body)
    error = body["error"]
    assert set(error) == {"type", "code", "message", "param", "detail"}
    assert error["message"]
    for leak in ("Traceback", 'File "', "/tmp/", "consignee-", "site-packages"):
        assert leak not in answer.text
    if OWN_CODE.fullmatch(error["code"]):
        assert error["type"] == (
            "server_error" if answer.is_server_error else "invalid_request_error"
        )
    else:
        assert CODES[error["code"]] == (answer.status_code, error["type"])
    _judge_error_headers(answer, error)


def _judge_error_headers(answer: httpx.Response, error: Mapping[str, Any]) -> None:
    match answer.status_code:
        case 401:
            assert answer.headers["www-authenticate"].startswith("Bearer ")
        case 405:
            assert answer.headers["allow"]
        case 413:
            assert isinstance(error["detail"]["max_bytes"], int)
        case 416:
            assert answer.headers["content-range"].startswith("bytes */")


def judge_response(response: Mapping[str, Any]) -> None:
    """A response object: the schema, and the keys that only the prose asks for."""
    validate("Response", response)
    wanted = {"error", "usage", "metadata", "previous_response_id", "store", "incomplete_details"}
    assert wanted <= response.keys()
    assert response["metadata"]["session_id"].startswith("hsess_")
    assert (response["error"] is not None) == (response["status"] == "failed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")


def _judge_file(file: Mapping[str, Any]) -> None:
    validate("File", file)
    assert re.fullmatch(r"file_[A-Za-z0-9]+", file["id"])
    assert isinstance(file["created_at"], int)
    assert re.fullmatch(r"[0-9a-f]{64}", file["sha256"])


def _judge_artifact(file: Mapping[str, Any]) -> None:
    _judge_file(file)
    assert re.fullmatch(r"cntr_[A-Za-z0-9]+", file["container_id"])
    assert isinstance(file["current"], bool)
    assert file["path"].rpartition("/")[2] == file["filename"]


def _judge_turn(turn: Mapping[str, Any]) -> None:
    assert turn["id"].startswith("resp_")
    assert turn["status"] in TERMINAL | {"in_progress"}
    assert all(isinstance(turn.get(key, ""), str) for key in ("user", "assistant"))
    assert all(isinstance(each, dict) for key in ("tools", "files") for each in turn[key])


def _each(key: str, judge_one: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(body: Any) -> None:
        for one in body[key]:
            judge_one(one)

    return check


def _page(key: str, judge_one: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(body: Any) -> None:
        _each(key, judge_one)(body)
        assert body["next_cursor"] is None or isinstance(body["next_cursor"], str)

    return check


def _named(name: str) -> Callable[[Any], None]:
    return lambda body: validate(name, body)


def _judge_session(session: Any) -> None:
    validate("Session", session)
    assert session["id"].startswith("hsess_")
    assert session["container_id"].startswith("cntr_")


def _judge_deletion(body: Any) -> None:
    assert body["deleted"] is True
    assert isinstance(body["id"], str)


_SHAPES: tuple[tuple[str, Callable[[Any], None]], ...] = (
    (r"DELETE /v1/.*", _judge_deletion),
    (r"GET /v1/uhp", _named("Discovery")),
    (r"GET /v1/harnesses", _each("harnesses", _named("Harness"))),
    (r"GET /v1/harnesses/[^/]+", _named("Harness")),
    (r"GET /v1/harnesses/[^/]+/models", _named("HarnessModels")),
    (r"GET /v1/models", _named("ModelCatalog")),
    (r"POST /v1/responses(/[^/]+/cancel)?", judge_response),
    (r"GET /v1/responses/[^/]+", judge_response),
    (r"GET /v1/responses/[^/]+/input_items", _each("data", lambda item: item["content"])),
    (r"GET /v1/sessions", _page("sessions", _judge_session)),
    (r"POST /v1/sessions(/[^/]+/cancel)?", _judge_session),
    (r"GET /v1/sessions/[^/]+", _judge_session),
    (r"GET /v1/sessions/[^/]+/turns", _each("turns", _judge_turn)),
    (r"GET /v1/sessions/[^/]+/files", _each("files", _judge_artifact)),
    (r"GET /v1/files", _page("files", _judge_file)),
    (r"POST /v1/files", _judge_file),
    (r"GET /v1/files/[^/]+", _judge_file),
    (r"PUT /v1/containers/.*", _judge_artifact),
)


def _is_raw(method: str, path: str) -> bool:
    last = urlsplit(path).path.rpartition("/")[2]
    return method == "GET" and last in ("content", "pdf", "archive")


def _judge_body(method: str, path: str, body: Any) -> None:
    for pattern, check in _SHAPES:
        if re.fullmatch(pattern, f"{method} {path}"):
            check(body)
            return
    raise AssertionError(f"nobody has said what {method} {path} answers")
