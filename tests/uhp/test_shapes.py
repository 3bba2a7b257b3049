"""The JSON shapes, against the published schema."""

from __future__ import annotations

from dataclasses import replace

from app.store.files import FileRecord
from app.uhp.shapes import artifact_object, upload_object
from tests.uhp.schema import validate

RECORD = FileRecord(
    id="file_1",
    scope="a",
    principal="alice",
    filename="b.txt",
    path="a/b.txt",
    media_type="text/plain",
    size=3,
    sha256="0" * 64,
    created_at=7,
    container_id="cntr_1",
    session_id="hsess_1",
    response_id="resp_1",
    kind="artifact",
    purpose=None,
    current=True,
    expires_at=None,
    position=1,
)


def test_an_artifact() -> None:
    shown = artifact_object(RECORD, "https://files.example")
    validate("File", shown)
    assert shown["download_url"] == (
        "https://files.example/v1/containers/cntr_1/files/file_1/content"
    )
    assert "scope" not in shown


def test_an_upload_says_when_it_ends() -> None:
    upload = replace(RECORD, kind="upload", purpose="user_data", container_id=None)
    assert "expires_at" not in upload_object(upload)
    shown = upload_object(replace(upload, expires_at=99))
    validate("File", shown)
    assert (shown["expires_at"], shown["purpose"]) == (99, "user_data")
    assert "container_id" not in shown
