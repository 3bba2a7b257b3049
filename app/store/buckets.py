"""What `blob_url` says of an object store, and the connection that follows from it.

    s3://BUCKET/PREFIX?region=…&endpoint=…    Amazon S3, and whatever speaks its protocol
    gs://BUCKET/PREFIX                        Google Cloud Storage
    az://CONTAINER/PREFIX?account_name=…      Azure Blob Storage

The URL says where; who may is known to the environment (AWS_ACCESS_KEY_ID and the like) or to
the instance. A URL with a credential in it is refused: it would be in process lists, in `config`
and in every copy of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from app.store.records import StoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from app.store.threads import Workers

ObjectStore = S3Store | GCSStore | AzureStore

CONNECT_SECONDS = 5
"""Time for a connection to stand: a store that is so far away is not reached at all."""

FIRST_PAUSE = timedelta(milliseconds=100)
LONGEST_PAUSE = timedelta(seconds=5)
"""Pauses between tries double from one to the other, with jitter, so that workers do not come
back all at once to a store that said 503."""

MAX_RETRIES = 10
"""More than the time allows at those pauses: `blob_retry_seconds` is what ends the trying."""

OPTIONS: Mapping[str, frozenset[str]] = {
    "s3": frozenset(
        {
            "checksum",
            "endpoint",
            "region",
            "server_side_encryption",
            "sse_bucket_key_enabled",
            "sse_kms_key_id",
            "virtual_hosted_style_request",
        }
    ),
    "gs": frozenset({"endpoint"}),
    "az": frozenset({"account_name", "endpoint"}),
}
"""The keys that a URL may have, by its scheme."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~-]+")
_CREDENTIAL = re.compile(r"key|secret|token|credential|password|signature|^sas|^sig$|service_acc")

_SIGN_SECONDS = 60
"""Validity of a request of our own: it is sent at once."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A parsed `blob_url`; `prefix` without slashes at its ends, `options` as given."""

    scheme: str
    name: str
    prefix: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the store is waited for: one request, and all tries of it, in seconds."""

    request_seconds: float = 30
    retry_seconds: float = 30


def parse_bucket(url: str) -> Bucket:
    """The bucket that `url` names.

    Raises StoreError for what is unknown, malformed or a credential; never shows a value.
    """
    parts = urlsplit(url)
    if parts.scheme not in OPTIONS:
        raise StoreError("blob_url: must begin with file://, s3://, gs:// or az://")
    if "@" in parts.netloc:
        raise _holds_credential()
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise StoreError(f"blob_url: must be {parts.scheme}://BUCKET/PREFIX, with a valid bucket")
    prefix = parts.path.strip("/")
    if prefix and not all(_SEGMENT.fullmatch(segment) for segment in prefix.split("/")):
        raise StoreError("blob_url: the prefix must be names of letters, digits, '.', '_' and '-'")
    return Bucket(parts.scheme, parts.netloc, prefix, _options(parts.scheme, parts.query))


def _options(scheme: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise StoreError("blob_url: what follows '?' must be KEY=VALUE&KEY=VALUE") from None
    options: dict[str, str] = {}
    for key, value in pairs:
        _require_known(scheme, key)
        if key in options or not value:
            raise StoreError(f"blob_url: {key} must be given once, with a value")
        options[key] = value
    _check_values(options)
    return options


def _require_known(scheme: str, key: str) -> None:
    if key in OPTIONS[scheme]:
        return
    if _CREDENTIAL.search(key.lower()):
        raise _holds_credential()
    known = ", ".join(sorted(OPTIONS[scheme]))
    raise StoreError(f"blob_url: unknown key {key[:40]!r}; {scheme}:// knows {known}")


def _check_values(options: Mapping[str, str]) -> None:
    if (endpoint := options.get("endpoint")) is not None:
        parts = urlsplit(endpoint)
        if "@" in parts.netloc:
            raise _holds_credential()
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise StoreError("blob_url: endpoint must be an http(s) URL without a query")
    if options.get("checksum", "sha256") not in ("sha256", "none"):
        raise StoreError("blob_url: checksum must be sha256 or none")
    for key in ("virtual_hosted_style_request", "sse_bucket_key_enabled"):
        if options.get(key, "true") not in ("true", "false"):
            raise StoreError(f"blob_url: {key} must be true or false")


def _holds_credential() -> StoreError:
    return StoreError(
        "blob_url: must hold no credential; give it by the environment (AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY) or "
        "let the instance have it"
    )


def connect(bucket: Bucket, patience: Patience) -> ObjectStore:
    """The client of a bucket; nothing is asked of the store yet. Raises StoreError."""
    kinds: dict[str, Callable[[Bucket, Patience], ObjectStore]] = {"s3": _s3, "gs": _gs, "az": _az}
    try:
        return kinds[bucket.scheme](bucket, patience)
    except (BaseError, ValueError, OSError) as error:
        # What it says may quote the environment: only its kind is told.
        raise StoreError(
            f"blob_url: this object store cannot be used ({type(error).__name__}); check the URL "
            "and the credentials of the environment"
        ) from None


def _s3(bucket: Bucket, patience: Patience) -> S3Store:
    options: dict[str, Any] = dict(bucket.options)
    if options.pop("checksum", "sha256") == "sha256":
        options["checksum_algorithm"] = "sha256"
    if (endpoint := options.pop("endpoint", None)) is not None:
        options["aws_endpoint_url_s3"] = endpoint  # the one that the environment cannot outdo
    # One object is deleted at a time, and some stores know no other way.
    return S3Store(
        bucket.name,
        prefix=bucket.prefix or None,
        disable_bulk_delete=True,
        client_options=_client(bucket, patience),
        retry_config=_retries(patience),
        **options,
    )


def _gs(bucket: Bucket, patience: Patience) -> GCSStore:
    options: dict[str, Any] = dict(bucket.options)
    if (endpoint := options.pop("endpoint", None)) is not None:
        options["base_url"] = endpoint
    return GCSStore(
        bucket.name,
        prefix=bucket.prefix or None,
        client_options=_client(bucket, patience),
        retry_config=_retries(patience),
        **options,
    )


def _az(bucket: Bucket, patience: Patience) -> AzureStore:
    options: dict[str, Any] = dict(bucket.options)
    return AzureStore(
        bucket.name,
        prefix=bucket.prefix or None,
        client_options=_client(bucket, patience),
        retry_config=_retries(patience),
        **options,
    )


def _client(bucket: Bucket, patience: Patience) -> ClientConfig:
    return {
        "allow_http": bucket.options.get("endpoint", "").startswith("http://"),
        "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, patience.request_seconds)),
        "timeout": timedelta(seconds=patience.request_seconds),
    }


def _retries(patience: Patience) -> RetryConfig:
    return {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=patience.retry_seconds),
        "backoff": {"init_backoff": FIRST_PAUSE, "max_backoff": LONGEST_PAUSE, "base": 2},
    }


class S3Signer:
    """Signed URLs of one bucket with parameters in the query, which `obstore.sign` cannot add.

    The address of the object, with its query, is made the endpoint of a client of its own, which
    signs it with the same credentials from the same sources: no key passes through this program.
    """

    def __init__(self, bucket: Bucket, patience: Patience, workers: Workers) -> None:
        self._bucket = bucket
        self._patience = patience
        self._workers = workers
        self._plain = connect(bucket, patience)

    async def object_url(
        self,
        method: obstore.HTTP_METHOD,
        key: str,
        query: Mapping[str, str],
        seconds: float = _SIGN_SECONDS,
    ) -> str:
        """A URL for `method` on the object `key` below the prefix, valid for `seconds`."""
        return await self._signed(await self._address(key), method, query, seconds)

    async def bucket_url(self, method: obstore.HTTP_METHOD, query: Mapping[str, str]) -> str:
        """A URL for `method` on the bucket itself, valid for a moment."""
        suffix = "/" + "/".join(filter(None, (self._bucket.prefix, "x")))
        address = (await self._address("x")).removesuffix(suffix)
        return await self._signed(address, method, query, _SIGN_SECONDS)

    async def _address(self, key: str) -> str:
        """Where the store's own client looks for an object."""
        url = await obstore.sign_async(self._plain, "GET", key, timedelta(seconds=1))
        return url.partition("?")[0]

    async def _signed(
        self, address: str, method: obstore.HTTP_METHOD, query: Mapping[str, str], seconds: float
    ) -> str:
        # The client appends "/" and a path: that ends in a parameter that S3 ignores, as it does
        # all that begin with "x-".
        endpoint = f"{address}?{urlencode(query, quote_via=quote)}&x-consignee="
        client = await self._workers.run(partial(self._client_of, endpoint))
        return await obstore.sign_async(client, method, "signed", timedelta(seconds=seconds))

    def _client_of(self, endpoint: str) -> ObjectStore:
        options: dict[str, Any] = {"region": r} if (r := self._bucket.options.get("region")) else {}
        return S3Store(
            self._bucket.name,
            aws_endpoint_url_s3=endpoint,
            virtual_hosted_style_request=True,
            client_options=_client(self._bucket, self._patience),
            **options,
        )
