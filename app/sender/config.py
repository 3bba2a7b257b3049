"""The upload configuration of one receiver, as the draft's schema has it (AHP-S02 to S09).

    {"endpoint": URL, "timeoutMs": INTEGER, "maxBytes": INTEGER, "auth": {…}}

It names where credentials are found and never holds one (AHP-S13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

import httpx
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from app.sender.errors import ConfigurationError

LOOPBACK_SWITCH: Final = "allow_loopback_http"

_URL_CHARACTERS = re.compile(r"[!-~]+")
_HOST = re.compile(
    r"(?=.{1,254}$)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|\[[0-9A-Fa-f:.]+\]"
)
_LOOPBACK = re.compile(r"localhost|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|\[::1\]")
_NOT_IN_TARGETS = re.compile(r'["<>\\^`{|}]|%(?![0-9A-Fa-f]{2})')


class _Table(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )


class _AuthTable(_Table):
    # What is not understood here could be a misspelt name, or a secret that must not be here.
    model_config = ConfigDict(extra="forbid")


class BearerAuth(_AuthTable):
    """A bearer token, found by exactly one of an environment variable and a reference (AHP-S09)."""

    type: Literal["bearer"] = "bearer"
    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    token_ref: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.token_env is None) == (self.token_ref is None):
            raise ValueError("give exactly one of tokenEnv and tokenRef")
        return self


class OAuthAuth(_AuthTable):
    """A client of one authorization server, for this resource alone."""

    type: Literal["oauth"] = "oauth"
    resource: str = Field(min_length=1)
    issuer: str = Field(pattern=r"^https://")
    client_id: str = Field(min_length=1)
    client_secret_ref: Annotated[str, Field(min_length=1)] | None = None
    flow: Literal["authorization_code_pkce", "client_credentials"]
    scopes: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()

    @field_validator("scopes")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("must name each scope once")
        return value


class UploadConfiguration(_Table):
    """Where one receiver takes bytes, and within which bounds.

    `timeout_ms` in milliseconds is for authorization, transfer and retries together; `max_bytes`
    is a bound of the transfer and never leave to cut. Without `auth` the endpoint's own OAuth
    discovery decides. Members that the draft does not know are ignored, as its schema does.
    """

    endpoint: str
    timeout_ms: int = Field(ge=1)
    max_bytes: int = Field(ge=0)
    auth: Annotated[BearerAuth | OAuthAuth, Field(discriminator="type")] | None = None

    @classmethod
    def parse(
        cls, mapping: Mapping[str, Any], *, allow_loopback_http: bool = False
    ) -> UploadConfiguration:
        """The configuration that `mapping` spells. Raises ConfigurationError.

        `allow_loopback_http` is the explicit switch for tests against this machine (AHP-S06).
        """
        try:
            return cls.model_validate(
                dict(mapping),
                context={LOOPBACK_SWITCH: allow_loopback_http},
                by_alias=True,
                by_name=False,
            )
        except ValidationError as error:
            raise ConfigurationError(_explained(error)) from None

    @field_validator("endpoint")
    @classmethod
    def _usable(cls, value: str, info: ValidationInfo) -> str:
        loopback_http = bool((info.context or {}).get(LOOPBACK_SWITCH))
        require_endpoint(value, allow_loopback_http=loopback_http)
        return value

    @property
    def is_encrypted(self) -> bool:
        """Whether the endpoint is reached over TLS."""
        return self.endpoint.startswith("https://")

    @property
    def target(self) -> bytes:
        """The request-target: path and query as configured, byte for byte (AHP-S03)."""
        parts = urlsplit(self.endpoint)
        rest = self.endpoint[len(f"{parts.scheme}://{parts.netloc}") :]
        return (rest if rest.startswith("/") else f"/{rest}").encode("ascii")

    @property
    def host(self) -> str:
        """The value of the Host header: name and port as configured."""
        return urlsplit(self.endpoint).netloc


def require_endpoint(url: str, *, allow_loopback_http: bool = False) -> None:
    """Raise ValueError, which says what is wrong, unless `url` can be an upload endpoint."""
    if not _URL_CHARACTERS.fullmatch(url):  # CR and LF among them (AHP-S33)
        raise ValueError("must be ASCII without spaces and control characters")
    parts = _split(url)
    if not url.startswith(("https://", "http://")) or not parts.netloc:
        raise ValueError("must be an absolute https URL")
    if "@" in parts.netloc or "#" in url:
        raise ValueError("must hold no user name, password or fragment")
    host = re.sub(r":[0-9]*$", "", parts.netloc)
    if _NOT_IN_TARGETS.search(url) or not _HOST.fullmatch(host):
        raise ValueError("must be a URL; percent-encode what else it holds")
    if parts.scheme == "http" and not (allow_loopback_http and _LOOPBACK.fullmatch(host)):
        raise ValueError("must be https; http is for tests on loopback that allow it explicitly")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        raise ValueError("must be a URL with a valid host and port") from None
    if port == 0:
        raise ValueError("must name a port that can be reached")
    return parts


def _explained(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    names = [str(part) for part in first["loc"] if part not in ("bearer", "oauth")]
    where = ".".join(["upload", *names])
    return f"{where}: {first['msg'].removeprefix('Value error, ')}."
