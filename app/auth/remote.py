"""The border to httpx: JSON documents from authorization servers, bounded in time and size."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

import httpx

from app import __version__

MAX_DOCUMENT_BYTES = 1024 * 1024
"""Largest document that is read: a hundred times what large key sets measure."""

MAX_CONNECTIONS = 20
"""Connections to authorization servers: a flood of tokens must not become one of requests."""


class RemoteFault(Exception):
    """No usable document came; the text says why and holds nothing of the request.

    `answered` tells a server that said something else from one that said nothing.
    """

    def __init__(self, reason: str, *, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered


class Remote:
    """One shared HTTP client for every authorization server. It follows no redirects."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            timeout=None,  # noqa: S113 - the whole exchange is limited, not its single steps
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            # Compression would make the size that is read differ from the size that is counted.
            headers={
                "User-Agent": f"consignee/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
            },
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def get(self, url: str, *, seconds: float) -> dict[str, Any]:
        """The JSON object at `url`. Raises RemoteFault."""
        return await self._exchange(self._client.build_request("GET", url), seconds)

    async def post(
        self, url: str, form: dict[str, str], *, authorization: str, seconds: float
    ) -> dict[str, Any]:
        """The JSON object that answers `form`. Raises RemoteFault."""
        request = self._client.build_request(
            "POST", url, data=form, headers={"Authorization": authorization}
        )
        return await self._exchange(request, seconds)

    async def _exchange(self, request: httpx.Request, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return _json_object(await self._read(request))
        except TimeoutError:
            raise RemoteFault(f"no answer within {seconds:g} s", answered=False) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RemoteFault(f"no connection ({type(error).__name__})", answered=False) from None

    async def _read(self, request: httpx.Request) -> bytes:
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code != httpx.codes.OK:
                raise RemoteFault(f"it answered with status {response.status_code}", answered=True)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise RemoteFault("its answer is compressed though not asked to", answered=True)
            return await _bounded(response)
        finally:
            await response.aclose()


async def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_DOCUMENT_BYTES:
            raise RemoteFault(f"its answer exceeds {MAX_DOCUMENT_BYTES} bytes", answered=True)
    return bytes(body)


def strict_json(text: bytes) -> Any:
    """What `text` holds as JSON; raises ValueError for anything else, NaN and deep nests too."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = strict_json(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise RemoteFault("its answer is no JSON object", answered=True)
    return document
