"""The challenge and the protected resource metadata that it points to (RFC 6750, RFC 9728)."""

from __future__ import annotations

from typing import Any

import pytest

from app.auth.authenticator import Authenticator
from app.auth.credentials import invalid, missing
from app.auth.metadata import documents, metadata_url
from app.errors import Forbidden
from app.settings import Settings

WELL_KNOWN = "/.well-known/oauth-protected-resource"
ISSUER = {"issuer": "https://as.test", "audience": "x"}


def settings(**values: Any) -> Settings:
    return Settings(**{"public_url": "https://files.test", **values})


@pytest.mark.requirement("AHP-R08", "B83")
def test_the_document_names_the_configured_endpoint() -> None:
    found = documents(settings(issuers=[ISSUER]))
    assert found == {
        WELL_KNOWN + "/ahp/uploads": {
            "resource": "https://files.test/ahp/uploads",
            "authorization_servers": ["https://as.test"],
            "bearer_methods_supported": ["header"],
            "scopes_supported": ["ahp.upload"],
        },
        WELL_KNOWN + "/ahp/hooks": {
            "resource": "https://files.test/ahp/hooks",
            "authorization_servers": ["https://as.test"],
            "bearer_methods_supported": ["header"],
            "scopes_supported": ["ahp.hooks"],
        },
    }


@pytest.mark.requirement("AHP-R08")
def test_no_issuer_means_no_list_of_them() -> None:
    document, _ = documents(settings()).values()
    assert "authorization_servers" not in document


@pytest.mark.requirement("AHP-R08")
def test_the_server_of_opaque_tokens_is_listed_once() -> None:
    introspection = {
        "url": "https://as.test/introspect",
        "client_id": "c",
        "client_secret_env": "S",
        "issuer": "https://as.test",
    }
    document, _ = documents(settings(issuers=[ISSUER], introspection=introspection)).values()
    assert document["authorization_servers"] == ["https://as.test"]


@pytest.mark.requirement("AHP-R03", "AHP-R08")
def test_every_upload_path_has_its_own_document() -> None:
    found = documents(settings(upload_paths=("/a/up", "/b/up"), hooks_paths=()))
    assert {path: document["resource"] for path, document in found.items()} == {
        WELL_KNOWN + "/a/up": "https://files.test/a/up",
        WELL_KNOWN + "/b/up": "https://files.test/b/up",
    }


@pytest.mark.requirement("AHP-R08")
def test_a_prefix_goes_behind_the_well_known_part() -> None:
    prefixed = settings(public_url="https://files.test/inbox/", hooks_paths=())
    assert metadata_url(prefixed, "/up") == f"https://files.test{WELL_KNOWN}/inbox/up"
    found = documents(prefixed)
    assert set(found) == {WELL_KNOWN + "/inbox/ahp/uploads", WELL_KNOWN + "/ahp/uploads"}
    assert {d["resource"] for d in found.values()} == {"https://files.test/inbox/ahp/uploads"}


@pytest.mark.requirement("AHP-R08", "AHP-R29", "AHP-R30", "B83")
def test_the_challenge_says_what_is_wrong() -> None:
    checker = Authenticator(settings(upload_paths=("/a", "/b")), environment={})
    bearer = f'Bearer resource_metadata="https://files.test{WELL_KNOWN}/a"'
    assert checker.challenge(missing("x")) == bearer
    assert checker.challenge(invalid("x")) == bearer + ', error="invalid_token"'
    assert checker.challenge(Forbidden("ahp.upload")) == (
        bearer + ', error="insufficient_scope", scope="ahp.upload"'
    )


@pytest.mark.requirement("AHP-R08", "AHP-R50")
@pytest.mark.parametrize(
    "url",
    [
        "https://files.test/a b",
        'https://f"x.test',
        "https://fäden.test",
        "https://f.test/\n",
        "https://f\\x.test",
    ],
)
def test_a_public_url_fits_into_a_header(url: str) -> None:
    with pytest.raises(ValueError, match="must be ASCII"):
        settings(public_url=url)


@pytest.mark.requirement("AHP-R08")
def test_the_challenge_points_to_the_path_that_was_asked_for() -> None:
    checker = Authenticator(settings(upload_paths=("/a", "/b")), environment={})
    assert checker.challenge(missing("x"), resource_path="/b").endswith(f'{WELL_KNOWN}/b"')
    assert checker.challenge(missing("x"), resource_path="/c").endswith(f'{WELL_KNOWN}/a"')
