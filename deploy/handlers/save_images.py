"""A worked example of an event handler: it writes every attached image to a folder.

    PYTHONPATH=deploy/handlers IMAGES_DIR=/srv/images \\
        CONSIGNEE_EVENT_HANDLER=save_images:handle consignee serve

The name of a file is the image's digest, so an image that is sent again is there once, and nothing
that a sender says becomes part of a path.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import aiofiles

from app.ahp.events import Attachment, Event

EXTENSIONS = {
    "image/avif": ".avif",
    "image/bmp": ".bmp",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/tiff": ".tif",
    "image/webp": ".webp",
}


async def handle(event: Event) -> None:
    """Keep the images of one event. There are no effects: what happens to it is not ours to say."""
    folder = Path(os.environ["IMAGES_DIR"])
    for attachment in event.attachments:
        media_type = attachment.media_type.partition(";")[0].strip().lower()
        if media_type.startswith("image/"):
            name = attachment.sha256 + EXTENSIONS.get(media_type, ".image")
            await _save(attachment, folder / name)


async def _save(attachment: Attachment, path: Path) -> None:
    """Write the bytes beside `path` first: a file of that name is never half there."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        # Written on a thread: a slow disk must not hold up the server.
        async with aiofiles.open(draft, "wb") as file, attachment.open() as stream:
            async for chunk in stream:
                await file.write(chunk)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
