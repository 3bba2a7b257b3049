"""The JSON shapes of what the store keeps (UHP schema: File, Session, TurnItem, Response)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.store.files import FileRecord
    from app.store.responses import ResponseRecord
    from app.store.sessions import SessionRecord


def download_url(base_url: str, record: FileRecord) -> str:
    """Where a client fetches an artifact: absolute, on the configured public URL (UHP-12)."""
    return f"{base_url}/v1/containers/{record.container_id}/files/{record.id}/content"


def upload_object(record: FileRecord) -> dict[str, Any]:
    """An uploaded file (UHP-04); `expires_at` tells when it ends, in unix seconds."""
    shape: dict[str, Any] = {
        "id": record.id,
        "object": "file",
        "filename": record.filename,
        "bytes": record.size,
        "created_at": record.created_at,
        "purpose": record.purpose,
        "sha256": record.sha256,
        "media_type": record.media_type,
    }
    if record.expires_at is not None:
        shape["expires_at"] = record.expires_at
    return shape


def artifact_object(record: FileRecord, base_url: str) -> dict[str, Any]:
    """An artifact as a session's listing has it (UHP-15)."""
    return {
        "id": record.id,
        "object": "file",
        "container_id": record.container_id,
        "filename": record.filename,
        "bytes": record.size,
        "created_at": record.created_at,
        "path": record.path,
        "current": record.current,
        "sha256": record.sha256,
        "media_type": record.media_type,
        "download_url": download_url(base_url, record),
    }


def session_object(record: SessionRecord) -> dict[str, Any]:
    """A session. Members that are unknown are left out: the schema knows no null for them."""
    shape: dict[str, Any] = {
        "id": record.id,
        "object": "session",
        "container_id": record.container_id,
        "status": record.status,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }
    if record.harness_id is not None:
        shape["harness_id"] = record.harness_id
    if record.title is not None:
        shape["title"] = record.title
    return shape


def turn_object(record: ResponseRecord, files: list[FileRecord], base_url: str) -> dict[str, Any]:
    """One task of a session's history (X-04)."""
    shape: dict[str, Any] = {
        "id": record.id,
        "object": "turn",
        "status": record.status,
        "created_at": record.created_at,
        "tools": _tools(record.response),
        "files": [artifact_object(file, base_url) for file in files],
    }
    texts = {"user": user_text(record), "assistant": assistant_text(record)}
    return shape | {name: text for name, text in texts.items() if text}


def user_text(record: ResponseRecord) -> str:
    """What the client asked for, as text."""
    return "\n".join(
        part["text"]
        for item in record.request.get("input_items", [])
        for part in item.get("content", [])
        if part.get("type") == "input_text"
    )


def assistant_text(record: ResponseRecord) -> str:
    """What the assistant said, as text."""
    return "".join(
        part["text"]
        for item in record.response.get("output", [])
        if item["type"] == "message"
        for part in item["content"]
    )


def _tools(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"call_id": item["call_id"], "name": item["name"], "arguments": item["arguments"]}
        for item in response.get("output", [])
        if item["type"] == "function_call"
    ]
