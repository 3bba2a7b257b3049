"""Which blob store a URL names."""

from __future__ import annotations

from pathlib import Path

from app.store.blobs import Blobs
from app.store.buckets import OPTIONS, Patience, parse_bucket
from app.store.local import LocalBlobs
from app.store.objects import ObjectBlobs
from app.store.records import StoreError
from app.store.threads import Workers


def open_blobs(url: str, workers: Workers, patience: Patience | None = None) -> Blobs:
    """The blob store that `url` names: `file:///an/absolute/folder`, or one of `buckets`.

    `patience` is for those behind a network. Raises StoreError for any other URL.
    """
    scheme, _, path = url.partition("://")
    if scheme in OPTIONS:
        return ObjectBlobs(parse_bucket(url), patience or Patience(), workers)
    if scheme != "file" or not path.startswith("/"):
        raise StoreError("blob_url: must be file:// and an absolute folder, s3://, gs:// or az://")
    return LocalBlobs(Path(path), workers)
