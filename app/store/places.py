"""Which blob store a URL names."""

from __future__ import annotations

from pathlib import Path

from app.store.blobs import Blobs
from app.store.local import LocalBlobs
from app.store.records import StoreError
from app.store.threads import Workers


def open_blobs(url: str, workers: Workers) -> Blobs:
    """The blob store that `url` names: `file:///an/absolute/folder`.

    Raises StoreError for any other.
    """
    scheme, _, path = url.partition("://")
    if scheme != "file" or not path.startswith("/"):
        raise StoreError("blob_url: must be file:// and an absolute folder")
    return LocalBlobs(Path(path), workers)
