"""What `blob_url` may say, and that no credential is ever in it or shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.errors import Unavailable
from app.settings import Settings
from app.store.blobs import new_location
from app.store.buckets import Bucket, Patience, connect, parse_bucket
from app.store.objects import ObjectBlobs
from app.store.places import open_blobs
from app.store.records import StoreError
from app.store.threads import Workers

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRET = "s3cr3t-value"
IMPATIENT = Patience(request_seconds=1, retry_seconds=0.1)
NOBODY = "http://127.0.0.1:9"
"""An address where nothing listens."""


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


def test_a_url_names_bucket_prefix_and_options() -> None:
    url = "s3://depot/a/b/?endpoint=https%3A%2F%2Fs3.example.com&region=eu-west-1"
    options = {"endpoint": "https://s3.example.com", "region": "eu-west-1"}
    assert parse_bucket(url) == Bucket("s3", "depot", "a/b", options)
    assert parse_bucket("gs://depot") == Bucket("gs", "depot", "", {})


@pytest.mark.parametrize(
    "url",
    [
        f"s3://depot/x?access_key_id={SECRET}",
        f"s3://depot/x?AWS_SECRET_ACCESS_KEY={SECRET}",
        f"s3://depot/x?session_token={SECRET}",
        f"s3://key:{SECRET}@depot/x",
        f"s3://depot/x?endpoint=https://key:{SECRET}@s3.example.com",
        f"gs://depot/x?service_account_key={SECRET}",
        f"gs://depot/x?service_account={SECRET}",
        f"az://depot/x?account_key={SECRET}",
        f"az://depot/x?sas_token={SECRET}",
        f"az://depot/x?sig={SECRET}",
        f"az://depot/x?client_secret={SECRET}",
    ],
)
def test_a_credential_in_the_url_is_refused_and_not_shown(url: str, workers: Workers) -> None:
    with pytest.raises(StoreError, match="must hold no credential") as refused:
        open_blobs(url, workers)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://depot/x?reigon=eu-west-1", "unknown key 'reigon'"),
        ("gs://depot/x?region=eu", "unknown key 'region'"),
        ("s3://depot/x?region=a&region=b", "given once"),
        ("s3://depot/x?region=", "given once"),
        ("s3://depot/x?region", "KEY=VALUE"),
        ("s3://depot/x?endpoint=ftp://example.com", "http"),
        ("s3://depot/x?endpoint=https://example.com?a=b", "without a query"),
        ("s3://depot/x?checksum=md5", "sha256 or none"),
        ("s3://depot/x?virtual_hosted_style_request=yes", "true or false"),
        ("s3:///x", "valid bucket"),
        ("s3://De_pot!/x", "valid bucket"),
        ("s3://depot/x#fragment", "valid bucket"),
        ("s3://depot/../x", "prefix"),
        ("s3://depot/a//b", "prefix"),
        ("s3://depot/a%2fb", "prefix"),
        ("ftp://depot/x", "file://"),
        ("file://relative", "file://"),
        ("s3:depot", "file://"),
    ],
)
def test_what_is_wrong_in_the_url_is_named(url: str, why: str, workers: Workers) -> None:
    with pytest.raises(StoreError, match=why):
        open_blobs(url, workers)


def test_no_other_scheme_is_parsed_as_a_bucket() -> None:
    with pytest.raises(StoreError, match="must begin with"):
        parse_bucket("file:///x")


def test_every_option_of_s3_is_one_that_the_client_knows() -> None:
    url = (
        "s3://depot/x?region=eu-west-1&checksum=none&virtual_hosted_style_request=true"
        "&server_side_encryption=aws:kms&sse_kms_key_id=alias/depot&sse_bucket_key_enabled=true"
        "&endpoint=https://depot.s3.example.com"
    )
    connect(parse_bucket(url), IMPATIENT)


def test_a_store_that_cannot_be_opened_does_not_show_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "depot")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"not base64: {SECRET}")
    with pytest.raises(StoreError, match="cannot be used") as refused:
        connect(parse_bucket("az://depot/x"), IMPATIENT)
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("url", "environment"),
    [
        # Its credential is asked for at the instance, which is nobody either.
        (
            f"gs://depot/x?endpoint={NOBODY}",
            {"GCE_METADATA_HOST": "127.0.0.1:9", "GCE_METADATA_IP": "127.0.0.1:9"},
        ),
        (
            f"az://depot/x?account_name=depot&endpoint={NOBODY}",
            {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"},
        ),
        (
            f"s3://depot/x?endpoint={NOBODY}",
            {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET},
        ),
    ],
    ids=["gs", "az", "s3"],
)
async def test_a_store_that_is_not_there_is_unavailable_and_says_nothing_of_itself(
    url: str,
    environment: dict[str, str],
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "consignee")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    blobs = open_blobs(url, workers, IMPATIENT)
    location = new_location(bytes(32))
    (tmp_path / "staged").write_bytes(b"x")
    for step in (blobs.size(location), blobs.publish(tmp_path / "staged", location), blobs.probe()):
        with pytest.raises(Unavailable) as refused:
            await step
        assert refused.value.code == "storage_unavailable"
        assert "127.0.0.1" not in refused.value.message
    assert SECRET not in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["gs", "az"])
async def test_links_and_multipart_listings_are_for_s3_only(
    scheme: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "depot")
    blobs = ObjectBlobs(Bucket(scheme, "depot", "x", {}), IMPATIENT, workers)
    location = new_location(bytes(32))
    assert await blobs.link(location, media_type="a/b", disposition="inline", seconds=1) is None
    assert await blobs.abort_unfinished(0) == 0


@pytest.mark.parametrize("url", [None, "gs://depot/x", "az://depot/x"])
def test_redirecting_downloads_needs_s3(url: str | None, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="redirect_downloads is for bodies in S3"):
        Settings(data_dir=tmp_path, blob_url=url, redirect_downloads=True)
    Settings(data_dir=tmp_path, blob_url="s3://depot/x", redirect_downloads=True)


@pytest.mark.parametrize("name", ["lifecycle-s3.json", "lifecycle-gcs.json"])
def test_the_rules_for_buckets_end_nothing_but_unfinished_uploads(name: str) -> None:
    rules = json.loads((DEPLOY / name).read_text(encoding="utf-8"))
    [rule] = rules.get("Rules") or rules["rule"]
    assert "AbortIncompleteMultipartUpload" in json.dumps(rule)
    assert "Expiration" not in json.dumps(rule)
    assert "Delete" not in json.dumps(rule)
