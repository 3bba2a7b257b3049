"""Resource and issuer metadata: where they are looked for, and what is not believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.sender.budget import Budget
from app.sender.destinations import MAX_DOCUMENT_BYTES, Courier, Destinations
from app.sender.discovery import Discovery, IssuerMetadata, ResourceMetadata
from app.sender.errors import AuthorizationError, BudgetExceeded
from tests.auth.issuer import Reply, Request
from tests.sender.authorities import (
    OPENID_PLACE,
    RESOURCE_PLACE,
    SERVER_PLACE,
    UPLOADS,
    World,
    scripted,
    world,
)

pytestmark = pytest.mark.anyio

RESOURCE = RESOURCE_PLACE + UPLOADS


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


async def resource(here: World, pointer: str | None = None, query: str = "") -> ResourceMetadata:
    endpoint = here.endpoint + query
    discovery = Discovery(Courier(trust=here.tls.trust))
    return await discovery.resource(endpoint, pointer, Destinations(httpx.URL(endpoint)))


async def issuer(here: World, name: str | None = None) -> IssuerMetadata:
    discovery = Discovery(Courier(trust=here.tls.trust))
    destinations = Destinations(httpx.URL(here.endpoint))
    return await discovery.issuer(name or here.issuer.url, destinations)


async def refused(here: World, *, pointer: str | None = None, name: str | None = None) -> str:
    """The code with which discovery ends: of the issuer `name`, else of the resource."""
    with pytest.raises(AuthorizationError) as caught:
        await (issuer(here, name) if name else resource(here, pointer))
    return caught.value.code


@pytest.mark.requirement("AHP-S11")
async def test_a_pointer_of_the_challenge_is_followed_and_nothing_else(here: World) -> None:
    here.receiver.routes["/meta?x=1"] = Reply(body=here.resource())
    found = await resource(here, here.receiver.url + "/meta?x=1")
    assert found.authorization_servers == (here.issuer.url,)
    assert [request.path for request in here.receiver.requests] == ["/meta?x=1"]


@pytest.mark.requirement("AHP-S11")
async def test_the_place_of_the_path_comes_before_the_root(here: World) -> None:
    assert (await resource(here)).resource == here.endpoint
    here.receiver.routes[RESOURCE_PLACE] = here.receiver.routes.pop(RESOURCE)
    assert (await resource(here)).resource == here.endpoint
    asked = [request.path for request in here.receiver.requests]
    assert asked == [RESOURCE, RESOURCE, RESOURCE_PLACE]


async def test_an_endpoint_at_the_root_has_one_place(here: World) -> None:
    endpoint = here.receiver.url + "/"
    here.receiver.routes[RESOURCE_PLACE] = Reply(body=here.resource(resource=endpoint))
    discovery = Discovery(Courier(trust=here.tls.trust))
    found = await discovery.resource(endpoint, None, Destinations(httpx.URL(endpoint)))
    assert found.resource == endpoint
    assert [request.path for request in here.receiver.requests] == [RESOURCE_PLACE]


async def test_the_query_of_the_endpoint_is_no_part_of_the_resource(here: World) -> None:
    assert (await resource(here, query="?tenant=acme")).resource == here.endpoint
    assert [request.path for request in here.receiver.requests] == [RESOURCE]


@pytest.mark.parametrize(
    "change",
    [
        "{}/other",
        "{}/ahp/uploads/",
        "{}/ahp/uploads?x=1",
        "{}",
        "https://else.test/ahp/uploads",
        "HTTPS://127.0.0.1/ahp/uploads",
    ],
)
@pytest.mark.requirement("AHP-S11")
async def test_metadata_of_another_resource_is_refused(here: World, change: str) -> None:
    here.publish_resource(resource=change.format(here.receiver.url))
    assert await refused(here) == "resource_mismatch"
    assert await refused(here, pointer=here.receiver.url + RESOURCE) == "resource_mismatch"
    assert here.issuer.requests == []


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"resource": 1}',
        b"\xff\xfe",
        b'{"a":' * 5000,
        b'{"resource": NaN}',
    ],
)
async def test_metadata_that_is_no_metadata(here: World, document: bytes) -> None:
    here.receiver.routes[RESOURCE] = Reply(body=document)
    here.issuer.routes[SERVER_PLACE] = Reply(body=document)
    assert await refused(here) == "metadata_invalid"
    assert await refused(here, name=here.issuer.url) == "metadata_invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"authorization_servers": None},
        {"authorization_servers": []},
        {"authorization_servers": "https://as.test"},
        {"bearer_methods_supported": ["body"]},
    ],
)
async def test_resource_metadata_that_leads_nowhere(here: World, change: dict[str, Any]) -> None:
    here.publish_resource(**change)
    assert await refused(here) == "metadata_invalid"


async def test_huge_metadata_is_not_read_to_its_end(here: World) -> None:
    here.receiver.routes[RESOURCE] = Reply(body=b" " * (MAX_DOCUMENT_BYTES + 1))
    assert await refused(here) == "metadata_invalid"


@pytest.mark.parametrize("status", [204, 301, 302, 307, 308, 500, 503])
@pytest.mark.requirement("AHP-S05")
async def test_only_a_missing_document_leads_to_the_next_place(here: World, status: int) -> None:
    away = (f"Location: {here.issuer.url}/x",)
    here.receiver.routes[RESOURCE] = Reply(status, headers=away)
    here.receiver.routes[RESOURCE_PLACE] = Reply(body=here.resource())
    assert await refused(here) == "metadata_unavailable"
    assert [request.path for request in here.receiver.requests] == [RESOURCE]
    assert here.issuer.requests == []


async def test_no_place_has_a_document(here: World) -> None:
    here.receiver.routes.clear()
    here.issuer.routes.clear()
    assert await refused(here) == "metadata_unavailable"
    assert await refused(here, name=here.issuer.url) == "metadata_unavailable"


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/meta", "https://else.test/meta", "/meta"])
async def test_a_pointer_elsewhere_is_not_followed(here: World, place: str) -> None:
    assert await refused(here, pointer=place) == "destination_refused"
    assert here.receiver.requests == []


async def test_discovery_never_leaves_https(here: World) -> None:
    """The loopback switch is for the upload alone: the metadata of http has no place."""
    async with scripted(None) as plain:
        endpoint = plain.url + UPLOADS
        plain.routes[RESOURCE] = Reply(body=here.resource(resource=endpoint))
        discovery = Discovery(Courier(trust=here.tls.trust))
        for pointer in (None, plain.url + RESOURCE):
            with pytest.raises(AuthorizationError) as caught:
                await discovery.resource(endpoint, pointer, Destinations(httpx.URL(endpoint)))
            assert caught.value.code == "destination_refused"
        assert plain.requests == []


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("", [SERVER_PLACE, OPENID_PLACE]),
        ("/", [SERVER_PLACE, OPENID_PLACE]),
        ("/t/1", [SERVER_PLACE + "/t/1", OPENID_PLACE + "/t/1", "/t/1" + OPENID_PLACE]),
        ("/t/", [SERVER_PLACE + "/t", OPENID_PLACE + "/t", "/t" + OPENID_PLACE]),
    ],
)
async def test_the_places_of_issuer_metadata(here: World, path: str, places: list[str]) -> None:
    name = here.issuer.url + path
    del here.issuer.routes[SERVER_PLACE]
    here.issuer.routes[places[-1]] = Reply(body=here.server(issuer=name))
    assert (await issuer(here, name)).issuer == name
    assert [request.path for request in here.issuer.requests] == places


@pytest.mark.parametrize("change", ["{}/", "{}/other", "https://else.test", "HTTPS://localhost"])
async def test_metadata_of_another_issuer_is_refused(here: World, change: str) -> None:
    here.publish_server(issuer=change.format(here.issuer.url))
    assert await refused(here, name=here.issuer.url) == "issuer_mismatch"


@pytest.mark.parametrize(
    "name",
    [
        "http://localhost:1",
        "https://a.test?x",
        "https://a.test/#x",
        "https://u@a.test",
        "as",
        "https://[",
    ],
)
async def test_an_issuer_that_is_no_issuer(here: World, name: str) -> None:
    assert await refused(here, name=name) == "destination_refused"
    assert here.issuer.requests == []


@pytest.mark.parametrize(
    "change",
    [{"token_endpoint": None}, {"token_endpoint": 1}, {"grant_types_supported": "all"}],
)
async def test_issuer_metadata_that_is_not_whole(here: World, change: dict[str, Any]) -> None:
    here.publish_server(**change)
    assert await refused(here, name=here.issuer.url) == "metadata_invalid"


async def test_what_issuer_metadata_does_not_say_has_the_defaults_of_rfc_8414(here: World) -> None:
    here.publish_server(grant_types_supported=None, code_challenge_methods_supported=None)
    found = await issuer(here)
    assert found.grant_types_supported == ("authorization_code", "implicit")
    assert found.code_challenge_methods_supported == ()
    assert found.token_endpoint_auth_methods_supported == ("client_secret_basic",)


@pytest.mark.requirement("AHP-S12")
async def test_slow_metadata_ends_with_the_budget(here: World) -> None:
    async def silent(request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    here.receiver.routes[RESOURCE] = silent
    with pytest.raises(BudgetExceeded):
        async with Budget(0.3).limit():
            await resource(here)
    assert len(here.receiver.requests) <= 1
