"""Every setting, once: its name, default, unit and meaning.

Values come, strongest first, from the command line, `CONSIGNEE_*` environment variables, and the
configuration file (`consignee.toml`, or the file that `--config` or `CONSIGNEE_CONFIG` names).
A key that is unknown or wrong is one clear error, raised before any port opens.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.addresses import is_loopback
from app.errors import CommandError

Permission = Literal["ahp.upload", "ahp.hooks", "refs.read", "uhp", "artifacts.write", "admin"]
ALL_PERMISSIONS: frozenset[Permission] = frozenset(get_args(Permission))

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

ENV_PREFIX = "CONSIGNEE_"
CONFIG_VARIABLE = "CONSIGNEE_CONFIG"
DEFAULT_CONFIG = "consignee.toml"

TASK_FILE_VARIABLE = "CONSIGNEE_TASK_FILE"
"""What an agent finds in its environment; it may itself call `consignee send`."""

_NOT_IN_URLS = re.compile(r"[^!#-\[\]-~]")
_DURATION = re.compile(r"(?P<count>[0-9]+)(?P<unit>[smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class SettingsError(CommandError):
    """The configuration cannot be used; the message names the key and what to do."""

    exit_status = 2


def _duration(value: object) -> object:
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return timedelta(seconds=int(match["count"]) * _SECONDS[match["unit"]])
    return value


Duration = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0))]
Size = Annotated[ByteSize, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def require_secure_url(url: str) -> str:
    """An absolute https URL, or http to a loopback host, without credentials and fragment."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an absolute http(s) URL")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError("must be https, unless its host is a loopback address")
    if parts.username or parts.password or "#" in url:
        raise ValueError("must hold no credentials and no fragment")
    if _NOT_IN_URLS.search(url):  # it goes into header values, and between quotes there
        raise ValueError("must be ASCII without spaces and quotes; encode what else it holds")
    return url


SecureUrl = Annotated[str, AfterValidator(require_secure_url)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class TokenSettings(_Table):
    """One configured bearer token: `[[tokens]]`."""

    name: str = Field(min_length=1, description="the principal's name, for logs and records")
    token_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the token, 64 lowercase hex (`consignee token new` prints one)",
    )
    token_env: str | None = Field(
        default=None, min_length=1, description="the environment variable that holds the token"
    )
    scope: str = Field(min_length=1, description="the authorization scope: who owns what it stores")
    permissions: frozenset[Permission] = Field(
        default=frozenset({"ahp.upload"}), description="what the token may do"
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if (self.token_sha256 is None) == (self.token_env is None):
            raise ValueError("give exactly one of token_sha256 and token_env")
        return self


class IssuerSettings(_Table):
    """One issuer of JWT access tokens: `[[issuers]]`."""

    issuer: SecureUrl = Field(description="the exact `iss` of its tokens")
    audience: tuple[str, ...] = Field(
        min_length=1, description="accepted `aud` values; one match is enough"
    )
    event_audience: tuple[str, ...] = Field(
        default=(),
        description="accepted `aud` values of tokens for events, beside the URLs of `hooks_paths`; "
        "a value that is in `audience`, too, is for both",
    )
    jwks_url: SecureUrl | None = Field(
        default=None, description="its key set; found by RFC 8414 or OpenID discovery when not set"
    )
    scope_claim: str | None = Field(
        default=None,
        description="the claim that becomes the scope; `iss` and `sub` together when not set",
    )
    permissions_from: str = Field(
        default="scope",
        description="the claim that lists permissions: names separated by spaces, or an array",
    )
    algorithms: tuple[
        Literal[
            "RS256",
            "RS384",
            "RS512",
            "PS256",
            "PS384",
            "PS512",
            "ES256",
            "ES384",
            "ES512",
            "Ed25519",
            "EdDSA",
        ],
        ...,
    ] = Field(default=("RS256", "ES256"), min_length=1, description="accepted signatures")
    jwks_cooldown_seconds: Seconds = Field(
        default=10, description="at most one refresh of the key set in this time"
    )
    jwks_refresh_seconds: Seconds = Field(
        default=300, description="age at which a key set is refreshed in the background"
    )
    jwks_stale_seconds: Seconds = Field(
        default=3600, description="how long known keys are used while the issuer does not answer"
    )
    timeout_seconds: Seconds = Field(default=5, description="limit of one request to the issuer")
    leeway_seconds: int = Field(
        default=30, ge=0, le=300, description="tolerated difference of clocks"
    )
    accept_untyped: bool = Field(
        default=False,
        description="also take tokens whose `typ` is `JWT` or missing (Keycloak, Entra ID, "
        "Cognito) and not only `at+jwt`; ID tokens are refused all the same",
    )

    @field_validator("audience", "event_audience", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class IntrospectionSettings(_Table):
    """Opaque tokens, asked about at their authorization server (RFC 7662): `[introspection]`."""

    url: SecureUrl = Field(description="the introspection endpoint")
    client_id: str = Field(min_length=1, description="this receiver's client at that server")
    client_secret_env: str = Field(
        min_length=1, description="the environment variable that holds the client's secret"
    )
    issuer: SecureUrl | None = Field(
        default=None,
        description="the server's issuer identifier: what `iss` must be where an answer has one, "
        "and what clients are told in the metadata",
    )
    audience: tuple[str, ...] = Field(
        default=(), description="accepted `aud` values; not checked when empty"
    )
    event_audience: tuple[str, ...] = Field(
        default=(),
        description="accepted `aud` values of tokens for events, beside the URLs of `hooks_paths`; "
        "a value that is in `audience`, too, is for both",
    )
    scope_claim: str | None = Field(
        default=None, description="the member that becomes the scope; `iss` and `sub` when not set"
    )
    permissions_from: str = Field(default="scope", description="the member that lists permissions")
    cache_seconds: float = Field(
        default=0, ge=0, le=300, description="how long an answer is reused; 0 asks every time"
    )
    timeout_seconds: Seconds = Field(default=5, description="limit of one request")
    leeway_seconds: int = Field(
        default=30, ge=0, le=300, description="tolerated difference of clocks"
    )


class AnonymousSettings(_Table):
    """What a request without a credential may do: `[anonymous]`; off unless given (AHP-R13)."""

    scope: str = Field(min_length=1, description="the scope that owns what it stores")
    permissions: frozenset[Permission] = Field(min_length=1, description="what it may do")


class HarnessSettings(_Table):
    """One configured harness: `[[harnesses]]`; without any there is one `echo`."""

    name: str = Field(min_length=1, max_length=100, description="its name, for people")
    base: Literal["echo", "command"] = Field(
        description="`echo` answers by itself, for tests; `command` runs a program"
    )
    id: str | None = Field(
        default=None,
        pattern=r"^chrn_[A-Za-z0-9]{1,64}$",
        description="its identifier; made from the name when not set",
    )
    models: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        default=("default",), min_length=1, description="its models; the first is the default"
    )
    timeout_seconds: int = Field(
        default=3600, ge=1, le=604_800, description="the longest that one task may take"
    )
    argv: tuple[str, ...] = Field(
        default=(),
        description="the program, by name or absolute path, and its arguments; no shell is "
        "involved; `{model}` in an argument stands for the model's name",
    )
    output: Literal["text", "jsonl"] = Field(
        default="text", description="what it writes to standard output: the answer, or events"
    )
    environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = Field(
        default=(),
        description="variables of the server that it gets beside PATH, LANG, HOME and TMPDIR",
    )
    max_output_bytes: Size = Field(
        default=ByteSize(16 * MIB), description="the most that it may write to standard output"
    )
    max_memory_bytes: Size = Field(
        default=ByteSize(4 * GIB),
        ge=16 * MIB,
        description="data of each of its processes, and private memory of all of them together",
    )
    max_workspace_bytes: Size = Field(
        default=ByteSize(4 * GIB), description="what its workspace may take on disk"
    )
    max_processes: int = Field(default=256, ge=1, description="processes that it may have at once")

    @property
    def harness_id(self) -> str:
        """The configured id, or one that follows from the name, the same after every restart."""
        return self.id or "chrn_" + hashlib.sha256(self.name.encode()).hexdigest()[:32]

    @model_validator(mode="after")
    def _command_is_whole(self) -> Self:
        if self.base == "echo":
            if given := sorted(self.model_fields_set & _COMMAND_KEYS):
                raise ValueError(f'{given[0]} is for base = "command"')
        elif not self.argv or not self.argv[0]:
            raise ValueError('argv is needed for base = "command"')
        elif "/" in self.argv[0] and not self.argv[0].startswith("/"):
            # It would be looked for in the folder that the agent writes into.
            raise ValueError("argv must begin with a plain name or an absolute path")
        return self


Detail = Literal["body", "metadata", "omit"]
EventName = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9]*\.(\*|[a-z0-9._]+))$")]


class SubscriptionSettings(_Table):
    """What a host is asked to send: `[[event_subscriptions]]`, told by `hooks/configuration`."""

    events: tuple[EventName, ...] = Field(
        min_length=1, description="names of events, `tool.*` for a family, `*` for all"
    )
    mode: Literal["observe", "intercept"] = Field(
        description="`observe` is told of them, `intercept` is asked and may change them"
    )
    content: dict[str, Detail] = Field(
        default={"default": "body"},
        description="what is sent of each category of content: `body`, `metadata` or `omit`; "
        "`default` is for those not named",
    )
    timeout_ms: int = Field(
        default=15_000,
        ge=1,
        description="how long a host waits for the answer to an `intercept`; more than "
        "`event_timeout_seconds`",
    )
    failure_policy: Literal["fail-open", "fail-closed"] = Field(
        default="fail-open", description="what a host does when an `intercept` has no answer"
    )
    include_native: bool = Field(
        default=False, description="whether the host's own form of an event is sent along"
    )
    tool_kinds: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="only events of these kinds of tools; all when empty"
    )
    paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="only events about these paths; all when empty"
    )

    @field_validator("content")
    @classmethod
    def _has_a_default(cls, value: dict[str, Detail]) -> dict[str, Detail]:
        if "default" not in value:
            raise ValueError('must say what is sent by default: default = "body", for one')
        return value

    @model_validator(mode="after")
    def _observing_has_no_answer(self) -> Self:
        given = sorted(self.model_fields_set & {"timeout_ms", "failure_policy"})
        if self.mode == "observe" and given:
            raise ValueError(f'{given[0]} is for mode = "intercept"')
        return self


_COMMAND_KEYS = {
    "argv",
    "output",
    "environment",
    "max_output_bytes",
    "max_memory_bytes",
    "max_workspace_bytes",
    "max_processes",
}


class Settings(BaseSettings):
    """The configuration of one receiver; every field is a key of `consignee.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    # Where it is
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on; 0 = any free")
    public_url: str | None = Field(
        default=None,
        description="the URL under which clients reach it; https says that a proxy or its own "
        "TLS protects the way; `http://HOST:PORT` when not set",
    )
    upload_paths: tuple[str, ...] = Field(
        default=("/ahp/uploads",), min_length=1, description="paths that take AHP uploads"
    )
    hooks_paths: tuple[str, ...] = Field(
        default=("/ahp/hooks",), description="paths that take AHP events; none when empty"
    )
    internal_refs: bool = Field(
        default=False,
        description="whether `GET /internal/refs/{ref}` gives the bytes of references to whoever "
        "has the permission `refs.read`",
    )
    workers: int = Field(
        default=1, ge=1, le=256, description="processes of `serve` that answer on the port"
    )
    tls_cert_file: Path | None = Field(default=None, description="certificate chain (PEM)")
    tls_key_file: Path | None = Field(default=None, description="private key (PEM)")
    trusted_proxies: tuple[str, ...] = Field(
        default=("127.0.0.1", "::1"),
        description="proxies whose X-Forwarded-For and -Proto are believed",
    )

    # Where it stores
    data_dir: Path = Field(
        default=Path("/var/lib/consignee"), description="folder of the database, bodies, staging"
    )
    database_url: str | None = Field(
        default=None,
        description="`postgresql+asyncpg://USER:PASSWORD@HOST/NAME`, or `sqlite:///` and the path "
        "of a file; SQLite in `data_dir` when not set",
    )
    blob_url: str | None = Field(
        default=None,
        description="where bodies lie: `s3://BUCKET/PREFIX?region=…`, `gs://…`, `az://…`, or a "
        "folder; `file://DATA_DIR/blobs` when not set",
    )
    blob_request_seconds: Seconds = Field(
        default=30, description="time of one request to an object store: a part, a range"
    )
    blob_retry_seconds: Seconds = Field(
        default=30,
        le=240,
        description="how long a failed request to an object store is tried again",
    )

    # Limits
    max_upload_bytes: Size = Field(default=ByteSize(GIB), description="largest body of one upload")
    inline_bytes: Size = Field(
        default=ByteSize(64 * KIB),
        le=16 * MIB,
        description="bodies up to this size are stored in the database row",
    )
    idle_timeout_seconds: Seconds = Field(
        default=30, description="a sender that sends nothing for this long is ended"
    )
    head_timeout_seconds: Seconds = Field(
        default=30, description="time for a request's head to arrive whole"
    )
    max_head_bytes: int = Field(
        default=64 * KIB,
        ge=KIB,
        description="a request's head that is longer than about this is refused: it is kept in "
        "memory until it is whole",
    )
    min_rate_bytes_per_second: int = Field(
        default=512,
        ge=0,
        description="a sender below this rate over `idle_timeout_seconds` is ended; 0 = no minimum",
    )
    drain_bytes: Size = Field(
        default=ByteSize(256 * MIB),
        description="how much of a refused body is read and thrown away so that the answer arrives",
    )
    drain_seconds: Seconds = Field(default=30, description="how long that may take")
    keep_alive_seconds: int = Field(
        default=75, ge=1, description="how long an idle connection is kept"
    )
    shutdown_seconds: int = Field(
        default=30, ge=1, description="time that running requests have to finish at shutdown"
    )
    io_threads: int = Field(
        default=8, ge=1, le=128, description="threads that read files and ask an embedded database"
    )
    database_timeout_seconds: Seconds = Field(
        default=15,
        description="how long a transaction waits for another process's lock, and for a database "
        "server that does not answer",
    )
    database_statement_timeout_seconds: Seconds = Field(
        default=30,
        description="how long the database server works on one statement, and bears with a "
        "transaction that stands still (PostgreSQL)",
    )
    database_connections: int = Field(
        default=8,
        ge=1,
        description="connections of this process that read from the database server (PostgreSQL)",
    )
    database_commits: int = Field(
        default=2,
        ge=1,
        description="transactions of this process that may run at once, each on one more "
        "connection (PostgreSQL)",
    )

    # Keeping
    retention: Duration | None = Field(
        default=None,
        description="how long a reference is kept (`30d`, `12h`); until it is removed when not set",
    )
    sweep_interval_seconds: Seconds = Field(
        default=300, description="pause between two sweeps of a running server"
    )
    orphan_age_seconds: Seconds = Field(
        default=3600, description="age at which stored bytes that no record names are removed"
    )

    # AHP: events
    max_event_bytes: Size = Field(default=ByteSize(4 * MIB), description="largest event")
    event_retention: Duration | None = Field(
        default=None,
        description="how long an event is kept, and with it the bytes that it uses, whatever "
        "becomes of their references; for ever when not set",
    )
    event_handler: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
        description="`package.module:callable` that is given each event; they are only stored "
        "when not set",
    )
    event_timeout_seconds: Seconds = Field(
        default=10, description="time that the handler has for one event"
    )
    upload_timeout_ms: int = Field(
        default=30_000,
        ge=1,
        description="time that a host is told to give one upload, its authorization and retries "
        "included",
    )
    event_subscriptions: tuple[SubscriptionSettings, ...] = Field(
        default=(), description="what hosts are asked to send; to observe everything when not set"
    )

    # UHP: files in
    max_request_bytes: Size = Field(
        default=ByteSize(64 * MIB),
        description="largest JSON request, files inline included; a larger file is uploaded first",
    )
    upload_ttl: Duration = Field(
        default=timedelta(days=7), description="how long an upload is kept for tasks to use"
    )
    secret_key_file: Path | None = Field(
        default=None,
        description="32 random bytes that seal cursors, the same file for every worker; made in "
        "`data_dir` when not set",
    )

    # UHP: files out
    accel: Literal["nginx"] | None = Field(
        default=None,
        description="who sends stored files in our place: nginx, told by X-Accel-Redirect; see "
        "deploy/nginx.conf",
    )
    accel_prefix: str = Field(
        default="/_consignee/blobs/",
        pattern=r"^/([A-Za-z0-9._~-]+/)+$",
        description="the internal location of that proxy; its alias is the folder of the bodies",
    )
    redirect_downloads: bool = Field(
        default=False,
        description="whether clients fetch artifacts and references from S3 themselves, sent there "
        "by a signed URL",
    )
    redirect_seconds: Seconds = Field(
        default=60,
        ge=1,
        le=3600,
        description="how long such a URL can be used; a download that has begun goes on",
    )
    preview_command: str | tuple[str, ...] | None = Field(
        default=None,
        description="the converter for previews, called as LibreOffice is; `soffice` or "
        "`libreoffice` on PATH when not set, none when empty",
    )
    preview_jobs: int = Field(
        default=2, ge=1, le=64, description="conversions that run at once in this process"
    )
    preview_timeout_seconds: Seconds = Field(
        default=60, description="limit of one conversion; a hanging converter is ended then"
    )
    preview_wait_seconds: Seconds = Field(
        default=120, description="how long a conversion waits for its turn before it is put off"
    )
    preview_memory_bytes: Size = Field(
        default=ByteSize(2 * GIB), description="memory of one conversion"
    )
    max_preview_source_bytes: Size = Field(
        default=ByteSize(64 * MIB), description="largest file that is converted"
    )
    max_preview_bytes: Size = Field(
        default=ByteSize(256 * MIB), description="largest PDF that a conversion may make"
    )
    preview_cache_bytes: Size = Field(
        default=ByteSize(GIB),
        description="disk that finished previews may take; the ones used least recently go first",
    )

    # UHP: sessions and tasks
    max_session_files: int | None = Field(
        default=20_000, ge=1, description="files that one session keeps"
    )
    max_session_bytes: Size | None = Field(
        default=ByteSize(16 * GIB), description="bytes that one session keeps"
    )
    max_scope_files: int | None = Field(
        default=None, ge=1, description="files that one scope keeps; no limit when not set"
    )
    max_scope_bytes: Size | None = Field(
        default=None, description="bytes of files that one scope keeps; no limit when not set"
    )
    max_tasks: int = Field(default=16, ge=1, description="tasks that run at once in each process")
    task_lost_seconds: Seconds = Field(
        default=30,
        ge=5,
        description="a task whose process gives no sign of life for this long becomes `failed`; "
        "the end of a process on the same machine is known at once",
    )
    max_requests_per_second: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="requests of one principal under /v1; no limit when not set",
    )
    session_ttl: Duration | None = Field(
        default=None,
        description="a session that nothing touched for this long expires; never when not set",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="origins whose pages may call /v1 from a browser"
    )

    # UHP: harnesses
    harnesses: tuple[HarnessSettings, ...] = Field(
        default=(), description="what runs tasks; the first is the default, one `echo` without any"
    )
    harness_grace_seconds: Seconds = Field(
        default=5, description="time that a cancelled program has to end before it is killed"
    )

    # Who may
    tokens: tuple[TokenSettings, ...] = Field(default=(), description="configured bearer tokens")
    issuers: tuple[IssuerSettings, ...] = Field(default=(), description="issuers of JWTs")
    introspection: IntrospectionSettings | None = Field(
        default=None, description="where opaque tokens are asked about"
    )
    anonymous: AnonymousSettings | None = Field(
        default=None, description="what requests without a credential may do"
    )

    # Being seen
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="loopback port that serves `/metrics` without a credential",
    )
    log_format: Literal["json", "text"] = Field(default="json", description="form of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    audit: Literal["off", "log", "file"] = Field(
        default="off",
        description="where it is recorded who stored, read and deleted what: nowhere, among the "
        "log lines, or in `audit_file`",
    )
    audit_file: Path | None = Field(
        default=None,
        description="file of the audit records; `audit.jsonl` in `data_dir` when not set",
    )
    otel: bool = Field(
        default=False,
        description="whether traces and metrics are sent by OpenTelemetry (OTLP over HTTP); wants "
        "the extra `otel`, and heeds the standard `OTEL_*` variables",
    )
    otel_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$",
        description="base URL of the collector; what `OTEL_EXPORTER_OTLP_ENDPOINT` says when not "
        "set, else `http://localhost:4318`",
    )
    otel_service_name: str | None = Field(
        default=None,
        min_length=1,
        description="name of this service there; what `OTEL_SERVICE_NAME` says when not set, else "
        "`consignee`",
    )
    otel_sample_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the traces that begin here which is sent; what `OTEL_TRACES_SAMPLER` "
        "says when not set, else all",
    )

    @field_validator("public_url")
    @classmethod
    def _public_url_is_a_base(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(require_secure_url(value))
        if parts.query:
            raise ValueError("must have no query")
        return value.rstrip("/")

    @field_validator("upload_paths", "hooks_paths")
    @classmethod
    def _paths_are_plain(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
                raise ValueError(f"{path!r} is not a plain absolute path such as /ahp/uploads")
        return value

    @model_validator(mode="after")
    def _paths_are_distinct(self) -> Self:
        paths = self.upload_paths + self.hooks_paths
        if len(set(paths)) != len(paths):
            raise ValueError("upload_paths and hooks_paths name a path twice")
        return self

    @field_validator("data_dir")
    @classmethod
    def _never_relative_to_a_later_folder(cls, value: Path) -> Path:
        return Path(os.path.abspath(value))  # noqa: PTH100 - absolute() keeps '..' segments

    @model_validator(mode="after")
    def _bodies_lie_where_they_are_sent_from(self) -> Self:
        if self.accel is not None and not self.blobs.startswith("file://"):
            raise ValueError("accel is for bodies in files; for S3 there is redirect_downloads")
        if self.redirect_downloads and not self.blobs.startswith("s3://"):
            raise ValueError("redirect_downloads is for bodies in S3: blob_url must be s3://")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("give both tls_cert_file and tls_key_file, or neither")
        return self

    @model_validator(mode="after")
    def _tokens_are_distinct(self) -> Self:
        digests = [t.token_sha256 for t in self.tokens if t.token_sha256]
        if len(set(digests)) != len(digests):
            raise ValueError("two tokens have the same token_sha256")
        return self

    @model_validator(mode="after")
    def _issuers_are_distinct(self) -> Self:
        names = [issuer.issuer for issuer in self.issuers]
        if len(set(names)) != len(names):
            raise ValueError("two issuers have the same issuer")
        return self

    @model_validator(mode="after")
    def _harnesses_are_distinct(self) -> Self:
        ids = [harness.harness_id for harness in self.harnesses]
        if len(set(ids)) != len(ids):
            raise ValueError("two harnesses have the same id or name")
        return self

    @property
    def base_url(self) -> str:
        """The public URL, without a trailing slash."""
        if self.public_url is not None:
            return self.public_url
        scheme = "https" if self.tls_cert_file else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    @property
    def upload_endpoints(self) -> tuple[str, ...]:
        """The absolute URL of every upload path."""
        return tuple(self.base_url + path for path in self.upload_paths)

    @property
    def hooks_endpoints(self) -> tuple[str, ...]:
        """The absolute URL of every hooks path."""
        return tuple(self.base_url + path for path in self.hooks_paths)

    @property
    def is_protected(self) -> bool:
        """Whether the way to this server is encrypted: own TLS, or an https `public_url`."""
        return self.tls_cert_file is not None or self.base_url.startswith("https://")

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in force."""
        return self.database_url or f"sqlite:///{self.data_dir / 'consignee.db'}"

    @property
    def blobs(self) -> str:
        """The URL of the bodies in force."""
        return self.blob_url or f"file://{self.data_dir / 'blobs'}"

    @property
    def previews_dir(self) -> Path:
        """The folder of previews and of conversions that run; always on this machine."""
        return self.data_dir / "previews"

    @property
    def audit_path(self) -> Path:
        """The file of the audit records, where there is one."""
        return self.audit_file or self.data_dir / "audit.jsonl"

    @property
    def staging_dir(self) -> Path:
        """The folder of bodies on their way in; always on this machine."""
        return self.data_dir / "staging"

    @property
    def secret_key(self) -> Path:
        """The file of the key that seals cursors."""
        return self.secret_key_file or self.data_dir / "secret.key"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, _FileSource(settings_cls)


class _FileSource(PydanticBaseSettingsSource):
    """The values of the configuration file that `load_settings` has read."""

    values: dict[str, Any] = {}  # noqa: RUF012 - replaced whole, never mutated

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        del field
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self.values)


def load_settings(
    config: Path | None = None, *, implicit_file: bool = True, **overrides: Any
) -> Settings:
    """Read the configuration; `overrides` that are None count as not given.

    Without `implicit_file` a `consignee.toml` that nobody named is not read.
    Raises SettingsError, with one line for each key at fault.
    """
    values = _read_file(config, implicit_file=implicit_file)
    _refuse_unknown_variables(values)
    given = {key: value for key, value in overrides.items() if value is not None}
    _FileSource.values = values
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(_describe(error)) from None
    finally:
        _FileSource.values = {}


def _read_file(config: Path | None, *, implicit_file: bool) -> dict[str, Any]:
    named = config or (Path(name) if (name := os.environ.get(CONFIG_VARIABLE)) else None)
    path = named or Path(DEFAULT_CONFIG)
    if named is None and not (implicit_file and path.exists()):
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not valid TOML: {error}") from None
    for key in ("data_dir", "tls_cert_file", "tls_key_file", "secret_key_file", "audit_file"):
        if isinstance(values.get(key), str):
            values[key] = path.absolute().parent / values[key]
    return values


def _refuse_unknown_variables(values: dict[str, Any]) -> None:
    allowed = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    allowed |= {CONFIG_VARIABLE, TASK_FILE_VARIABLE}
    for name in sorted(os.environ):
        if not name.startswith(ENV_PREFIX) or name in _named_secrets(values):
            continue
        if name.split("__", 1)[0] not in allowed:
            raise SettingsError(f"{name}: unknown variable; see the README's table of settings")


def _named_secrets(values: dict[str, Any]) -> set[str]:
    """The variables that the file itself names as holders of secrets."""
    tokens = values.get("tokens", [])
    names = {t.get("token_env") for t in tokens if isinstance(t, dict)}
    introspection = values.get("introspection")
    if isinstance(introspection, dict):
        names.add(introspection.get("client_secret_env"))
    for harness in values.get("harnesses", []):
        if isinstance(harness, dict) and isinstance(passed := harness.get("environment"), list):
            names.update(name for name in passed if isinstance(name, str))
    return {name for name in names if isinstance(name, str)}


def _describe(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_input=False, include_url=False, include_context=False):
        key = ".".join(str(part) for part in fault["loc"]) or "configuration"
        text = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"]
        lines.append(f"{key}: {text.removeprefix('Value error, ')}")
    return "; ".join(lines)
