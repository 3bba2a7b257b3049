"""`POST /v1/responses`: the body in, a checked request out, or a refusal. Pure, no I/O.

Fields that this server does not understand are ignored and reported (Tasks section 1.1, T-08 to
T-10); fields that it does understand have their type, or the request is 400 with `param`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from app.http import names
from app.uhp.data_urls import DataUrl, parse_data_url
from app.uhp.errors import invalid_input

MAX_KEY_LENGTH = 255
MAX_PARTS = 10_000
MAX_TITLE_LENGTH = 120
DEFAULT_IMAGE_NAME = "image"

_UNDERSTOOD = frozenset(
    {
        "background",
        "input",
        "instructions",
        "max_output_tokens",
        "max_step",
        "metadata",
        "model",
        "previous_response_id",
        "store",
        "stream",
        "timeout_seconds",
    }
)
_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})
_FILE_TYPES = frozenset({"input_file", "input_image"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file that a task brings: inline in `data`, or by the id of an upload.

    `param` is where it stands in the request.
    """

    param: str
    filename: str | None
    file_id: str | None
    data: DataUrl | None


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """A checked request. `items` is the input as it is shown again by `input_items`."""

    prompt: str
    items: list[dict[str, Any]]
    files: tuple[FilePart, ...] = ()
    model: str | None = None
    harness_id: str | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    background: bool = False
    store: bool = True
    max_step: int | None = None
    max_output_tokens: int | None = None
    timeout_seconds: int | None = None
    ignored_fields: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The beginning of the prompt, for listings."""
        words = self.prompt[: 4 * MAX_TITLE_LENGTH].replace("\0", " ").split()
        return " ".join(words)[:MAX_TITLE_LENGTH]


def parse_task(body: Any, *, file_limit: int) -> TaskRequest:
    """Check the body of a task. `file_limit` bounds each inline file, decoded, in bytes.

    Raises UhpError (`invalid_input`), and TooLarge for an inline file over the limit.
    """
    if not isinstance(body, dict):
        raise invalid_input("The request body must be a JSON object.")
    reader = _InputReader(file_limit)
    reader.read(body.get("input"))
    metadata = _metadata(body)
    return TaskRequest(
        prompt="\n".join(reader.prompt),
        items=reader.items,
        files=tuple(reader.files),
        model=_text(body, "model"),
        harness_id=metadata.pop("harness_id", None),
        previous_response_id=_text(body, "previous_response_id"),
        instructions="\n".join([*reader.guidance, _text(body, "instructions") or ""]).strip()
        or None,
        metadata=metadata,
        stream=_flag(body, "stream", default=False),
        background=_flag(body, "background", default=False),
        store=_flag(body, "store", default=True),
        max_step=_budget(body, "max_step"),
        max_output_tokens=_budget(body, "max_output_tokens"),
        timeout_seconds=_budget(body, "timeout_seconds"),
        ignored_fields=tuple(sorted(set(body) - _UNDERSTOOD)),
    )


def digest_of_request(body: Any) -> bytes:
    """What makes two requests the same under one Idempotency-Key: equal JSON."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).digest()


def check_key(value: str | None) -> str | None:
    """An Idempotency-Key of 1 to 255 characters, or None without one."""
    if value is None:
        return None
    if not 1 <= len(value) <= MAX_KEY_LENGTH or not value.isprintable():
        raise invalid_input(f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters.")
    return value


class _InputReader:
    """Collects text, guidance and files from `input`, in order."""

    def __init__(self, file_limit: int) -> None:
        self.prompt: list[str] = []
        self.guidance: list[str] = []
        self.items: list[dict[str, Any]] = []
        self.files: list[FilePart] = []
        self._file_limit = file_limit
        self._parts = 0

    def read(self, value: Any) -> None:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise invalid_input("input must be a string or a list of items.", param="input")
        for index, item in enumerate(value):
            self._item(item, f"input.{index}")

    def _item(self, item: Any, param: str) -> None:
        if not isinstance(item, dict):
            raise invalid_input("An input item must be an object.", param=param)
        if _kind(item) in _TEXT_TYPES | _FILE_TYPES:
            shown = [self._part(item, "user", param)]
            self.items.append({"type": "message", "role": "user", "content": shown})
            return
        if item.get("type", "message") != "message":
            raise invalid_input("This type of input item is not supported.", param=f"{param}.type")
        role = item.get("role", "user")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid_input(
                f"role must be one of {', '.join(sorted(_ROLES))}.", param=f"{param}.role"
            )
        content = self._content(item.get("content"), role, f"{param}.content")
        self.items.append({"type": "message", "role": role, "content": content})

    def _content(self, content: Any, role: str, param: str) -> list[dict[str, Any]]:
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        if not isinstance(content, list) or not content:
            raise invalid_input("content must be a string or a list of parts.", param=param)
        return [self._part(part, role, f"{param}.{index}") for index, part in enumerate(content)]

    def _part(self, part: Any, role: str, param: str) -> dict[str, Any]:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid_input(f"A task takes at most {MAX_PARTS} parts.", param="input")
        kind = _kind(part)
        if kind in _TEXT_TYPES:
            return self._take_text(part, role, param)
        if kind in _FILE_TYPES:
            return self._take_file(part, param)
        raise invalid_input("This type of content part is not supported.", param=f"{param}.type")

    def _take_text(self, part: dict[str, Any], role: str, param: str) -> dict[str, Any]:
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid_input("text must be a string.", param=f"{param}.text")
        if role in ("system", "developer"):
            self.guidance.append(text)
        elif role == "user":
            self.prompt.append(text)
        else:
            self.prompt.append(f"Assistant: {text}")
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": kind, "text": text}

    def _take_file(self, part: dict[str, Any], param: str) -> dict[str, Any]:
        file = self._file_part(part, param)
        self.files.append(file)
        shown = {"type": part["type"]}
        if file.filename is not None:
            shown["filename"] = file.filename
        if file.file_id is not None:
            return shown | {"file_id": file.file_id}
        assert file.data is not None
        return shown | {"media_type": file.data.media_type, "bytes": file.data.size}

    def _file_part(self, part: dict[str, Any], param: str) -> FilePart:
        named = {
            key: part[key]
            for key in ("file_id", "file_data", "image_url")
            if part.get(key) is not None
        }
        if len(named) != 1:
            raise invalid_input("Give exactly one of file_data and file_id.", param=param)
        key, value = next(iter(named.items()))
        if key == "image_url" and part["type"] != "input_image":
            raise invalid_input("Only input_image has image_url.", param=f"{param}.image_url")
        filename = _filename(part, param)
        if key == "file_id":
            if not isinstance(value, str):
                raise invalid_input("file_id must be a string.", param=f"{param}.file_id")
            return FilePart(f"{param}.file_id", filename, value, None)
        data = parse_data_url(value, limit=self._file_limit, param=f"{param}.{key}")
        return FilePart(f"{param}.{key}", filename or _default_name(part, param, data), None, data)


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def _filename(part: dict[str, Any], param: str) -> str | None:
    value = part.get("filename")
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid_input("filename must be a string.", param=f"{param}.filename")
    return names.accept(value, param=f"{param}.filename")


def _default_name(part: dict[str, Any], param: str, data: DataUrl) -> str:
    if part["type"] == "input_file":
        raise invalid_input("An inline file needs a filename.", param=f"{param}.filename")
    subtype = data.media_type.partition("/")[2].partition("+")[0]
    extension = {"jpeg": "jpg", "svg": "svg", "plain": "txt"}.get(subtype, subtype)
    return f"{DEFAULT_IMAGE_NAME}.{extension}" if extension.isalnum() else DEFAULT_IMAGE_NAME


def _metadata(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise invalid_input("metadata must be an object.", param="metadata")
    if metadata.get("harness_id") is not None and not isinstance(metadata["harness_id"], str):
        raise invalid_input("harness_id must be a string.", param="metadata.harness_id")
    return dict(metadata)


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid_input(f"{name} must be a string.", param=name)
    return value


def _flag(body: dict[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid_input(f"{name} must be true or false.", param=name)
    return value


def _budget(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise invalid_input(f"{name} must be a positive whole number.", param=name)
    return value
