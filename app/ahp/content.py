"""Canonical messages: what they may look like, and what a view of them discloses. Pure, no I/O.

A message has a role and ordered parts; a part is inline text or an attachment, and an attachment
is a reference to bytes that were uploaded before (AHP-CONTENT-001). A selection says for each
category whether a view gets the body, the metadata or neither (AHP-CONTENT-002):

    parse_messages    JSON in, models out, or Malformed
    category_of       the one place where a part gets its category
    project           messages and a selection in, the view out, and what it withholds
    admit_edit        what an edit of messages may not do to attachments and categories

What a view withholds must not stand in the opaque JSON of its event either: app/ahp/opaque.py.

Where the document says more than the draft's JSON schema, the document counts:

* a media type must be one, and is judged without case, blanks and parameters; what is derived from
  JSON without saying `+json`, such as application/jsonl, is JSON too (AHP-C14);
* the reference of a body that is not uploaded yet never leaves its process;
* text must be Unicode that can be written as UTF-8.
"""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.errors import Malformed
from app.http import media_types

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

T = TypeVar("T")
Mode = Literal["body", "metadata", "omit"]

PENDING_REF = "ahp:owned:pending"
"""What the draft's SDK puts where a body is still to be uploaded; never valid in an event."""

MAX_PARAM_CHARACTERS = 200

_RANKS: Final[dict[Mode, int]] = {"omit": 0, "metadata": 1, "body": 2}
_JSON_SUBTYPES = frozenset(
    {
        "json",
        "json-seq",
        "json5",
        "jsonl",
        "jsonlines",
        "ndjson",
        "x-json",
        "x-jsonl",
        "x-jsonlines",
        "x-ndjson",
    }
)
_MEDIA_CATEGORIES = {"image": "images", "audio": "audio", "video": "video"}


def is_attachment_type(media_type: str) -> bool:
    """Whether bytes of `media_type` are an attachment (AHP-C14).

    False for text and JSON in any spelling and with any parameters, and for what is not one media
    type: nobody can tell that it is neither.
    """
    kind, subtype = _essence(media_type)
    if not subtype or "*" in (kind, subtype) or kind == "text":
        return False
    return _JSON_SUBTYPES.isdisjoint(subtype.split("+"))


def _essence(media_type: str) -> tuple[str, str]:
    """Type and subtype in lower case, both empty for what is not a media type."""
    try:
        accepted = media_types.accept(media_type, param="mediaType")
    except Malformed:
        return "", ""
    kind, _, subtype = accepted.partition(";")[0].rstrip(" \t").partition("/")
    return kind, subtype


def _require_attachment_type(value: str) -> str:
    if not is_attachment_type(value):
        raise PydanticCustomError(
            "attachment_type",
            "An attachment has a media type that is neither text nor JSON; text goes inline.",
        )
    return value


def _require_uploaded(value: str) -> str:
    if value == PENDING_REF:
        raise PydanticCustomError(
            "pending_reference", "The body is not uploaded yet; use the reference of its receipt."
        )
    return value


def _require_utf8(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "Text is Unicode without lone surrogates.") from None
    return value


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is the integer 3, as JSON Schema has it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _ordered(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, Field(min_length=1), AfterValidator(_require_utf8)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0), BeforeValidator(_whole)]


class _Wire(BaseModel):
    """An object of the protocol: no unknown members, nothing null, nothing converted."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_by_alias=True,
        validate_by_name=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_null(cls, data: Any) -> Any:
        if isinstance(data, dict) and any(value is None for value in data.values()):
            raise PydanticCustomError("null", "Leave a member out instead of giving null.")
        return data

    def wire(self) -> dict[str, Any]:
        """The JSON object of this model."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Gap(_Wire):
    """Why a body that was asked for is not there (AHP-C20)."""

    reason: Text
    path: Text | None = None


class Reference(_Wire):
    """The body of an attachment: where the receiver keeps it, and nothing else (AHP-C13)."""

    ref: Annotated[Text, AfterValidator(_require_uploaded)]


class _Part(_Wire):
    content_name: ClassVar[str]

    id: Text
    media_type: str
    selection: Mode
    category: Text | None = None
    synthesized: bool | None = None
    size: Size | None = None
    sha256: Digest | None = None
    gap: Gap | None = None

    @property
    @abstractmethod
    def content(self) -> str | None:
        """What a withheld part must not show: the text, or the reference of the body."""

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        if self.selection == "body":
            self._check_body()
        elif self.content is not None or self.gap is not None:
            raise PydanticCustomError(
                "withheld", "A part whose selection is not body has no text, body or gap."
            )
        return self

    def _check_body(self) -> None:
        if (self.content is None) == (self.gap is None):
            raise PydanticCustomError(
                "body", "A part whose selection is body has either its content or a gap."
            )
        if self.content is not None and (self.size is not None or self.sha256 is not None):
            raise PydanticCustomError(
                "ready", "size and sha256 belong to the receipt, not to a part with its content."
            )

    def viewed(self, mode: Mode) -> Self:
        """This part as a view of at most `mode` shows it. `omit` drops size and digest, too."""
        if mode == "body":
            return self
        dropped = {"gap", self.content_name} | ({"size", "sha256"} if mode == "omit" else set())
        return self._changed(dropped, selection=mode)

    def missing(self, reason: str, path: str | None = None) -> Self:
        """This part with a gap where its content was asked for (AHP-S22, AHP-C20)."""
        gap = {"reason": reason} | ({} if path is None else {"path": path})
        return self._changed({"gap", self.content_name}, selection="body", gap=gap)

    def _changed(self, dropped: Collection[str], **members: Any) -> Self:
        kept = {name: value for name, value in self.wire().items() if name not in dropped}
        return self.model_validate(kept | members)


class TextPart(_Part):
    """Text, inline. Structure is serialized into it and never looked into (AHP-C10, C11)."""

    content_name: ClassVar[str] = "text"

    kind: Literal["text"]
    media_type: Literal["text/plain"] = Field(alias="mediaType")
    text: Annotated[str, AfterValidator(_require_utf8)] | None = Field(default=None, repr=False)

    @property
    def content(self) -> str | None:
        return self.text


class AttachmentPart(_Part):
    """Immutable bytes that are neither text nor JSON, by reference (AHP-C13, C14)."""

    content_name: ClassVar[str] = "body"

    kind: Literal["attachment"]
    media_type: Annotated[str, AfterValidator(_require_attachment_type)] = Field(alias="mediaType")
    body: Reference | None = None

    @property
    def content(self) -> str | None:
        return None if self.body is None else self.body.ref

    def ready(self, ref: str) -> AttachmentPart:
        """This part with the reference of a confirmed upload, and without what the receipt says
        of it (AHP-C17)."""
        return self._changed({"gap", "body", "size", "sha256"}, selection="body", body={"ref": ref})


Part = TextPart | AttachmentPart
_PartOfKind = Annotated[Part, Discriminator("kind")]


class Message(_Wire):
    """One message of a conversation. The order of its parts has a meaning (AHP-C03 to C06)."""

    id: Text
    role: Literal["system", "developer", "user", "assistant", "tool"]
    parts: Annotated[tuple[_PartOfKind, ...], BeforeValidator(_ordered)]
    synthesized: bool | None = None


class ContentSelection(_Wire):
    """What a view gets of each category: `default`, and a mode by category name (AHP-C18)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Mode]

    default: Mode

    def view_of(self, part: Part) -> Mode:
        """The mode of the category of `part`. It is no permission to disclose anything."""
        return self.mode_of(category_of(part))

    def mode_of(self, category: str) -> Mode:
        """The mode of `category`, the default for an unknown one.

        A name that differs from a listed one in case, blanks or punctuation alone gets no more
        than the listed one does: a new spelling is no way around a policy (AHP-C19).
        """
        folded = _fold(category)
        exact = self.__pydantic_extra__.get(category, self.default)
        alike = (mode for name, mode in self.__pydantic_extra__.items() if _fold(name) == folded)
        return _strictest([exact, *alike])


def _fold(category: str) -> str:
    normal = unicodedata.normalize("NFKC", category).casefold()
    return "".join(character for character in normal if character.isalnum())


def _strictest(modes: Iterable[Mode]) -> Mode:
    return min(modes, key=_RANKS.__getitem__)


_PART: TypeAdapter[Part] = TypeAdapter(_PartOfKind)
_PARTS: TypeAdapter[tuple[Part, ...]] = TypeAdapter(
    Annotated[tuple[_PartOfKind, ...], BeforeValidator(_ordered)]
)
_MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(
    Annotated[tuple[Message, ...], BeforeValidator(_ordered)]
)
_SELECTION: TypeAdapter[ContentSelection] = TypeAdapter(ContentSelection)


def parse_part(value: Any, *, param: str = "part") -> Part:
    """Check one part as JSON has it. Raises Malformed, which names the member at fault."""
    return _parse(_PART, value, param)


def parse_parts(value: Any, *, param: str = "parts") -> tuple[Part, ...]:
    """Check the list of a content slot that has no roles (AHP-C08). Raises Malformed."""
    return _parse(_PARTS, value, param)


def parse_messages(value: Any, *, param: str = "messages") -> tuple[Message, ...]:
    """Check a list of messages as JSON has it. Raises Malformed."""
    return _parse(_MESSAGES, value, param)


def parse_selection(value: Any, *, param: str = "content") -> ContentSelection:
    """Check a selection as JSON has it. Raises Malformed."""
    return _parse(_SELECTION, value, param)


def _parse(adapter: TypeAdapter[T], value: Any, param: str) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _where(param, first["loc"])
        reason = _KIND if first["type"].startswith("union_tag") else first["msg"]
        raise Malformed("invalid_content", f"{where}: {reason}", param=where) from None


_KIND = "kind is text or attachment; structure is serialized into text."  # pydantic's has the value


def _where(param: str, location: tuple[int | str, ...]) -> str:
    """The path of a member. The kind of a part, which pydantic puts into it, is left out."""
    steps = [
        step
        for before, step in zip((0, *location), location, strict=False)
        if not (step in ("text", "attachment") and isinstance(before, int))
    ]
    return ".".join(map(str, [param, *steps]))[:MAX_PARAM_CHARACTERS]


def category_of(part: Part) -> str:
    """The category that selects `part`: its own, else what its media type stands for (C18)."""
    if part.category is not None:
        return part.category
    if isinstance(part, TextPart):
        return "text"
    return _MEDIA_CATEGORIES.get(_essence(part.media_type)[0], "files")


def references_in(messages: Iterable[Message]) -> tuple[str, ...]:
    """The references of the bodies in `messages`, in order, each once."""
    return references_of(_parts_of(messages))


def references_of(parts: Iterable[Part]) -> tuple[str, ...]:
    """The references of the bodies in `parts`, in order, each once."""
    bodies = (part.body for part in parts if isinstance(part, AttachmentPart))
    return tuple(dict.fromkeys(body.ref for body in bodies if body is not None))


def _parts_of(messages: Iterable[Message]) -> Iterator[Part]:
    return (part for message in messages for part in message.parts)


@dataclass(frozen=True, slots=True)
class Withheld:
    """Content that a view does not show: what it says or refers to, as far as that is known.

    `sha256` is 64 lowercase hex of the octets, text as UTF-8.
    """

    category: str
    text: str | None = field(default=None, repr=False)
    ref: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """A view of messages, in their order.

    `wanted` are the attachments whose bodies the view asks for, which is what has to be uploaded;
    nothing else may be (AHP-C22).
    """

    messages: tuple[Message, ...]
    wanted: tuple[AttachmentPart, ...]
    withheld: tuple[Withheld, ...]


@dataclass(frozen=True, slots=True)
class PartsProjection:
    """As Projection, of a content slot without roles."""

    parts: tuple[Part, ...]
    wanted: tuple[AttachmentPart, ...]
    withheld: tuple[Withheld, ...]


def project(
    messages: Sequence[Message], selection: ContentSelection, *, beside: Iterable[Part] = ()
) -> Projection:
    """The view of `messages` that `selection` allows; applying it again changes nothing.

    A part never gets more than its own `selection` says. Text and references that are withheld in
    one part are withheld in each other part that repeats them, whatever its category; `beside` are
    the parts of the event's other slots, which count as well.
    """
    parts = tuple(_parts_of(messages))
    modes = _Modes(selection, [*beside, *parts])
    shown = tuple(map(modes.apply, messages))
    visible = tuple(_parts_of(shown))
    return Projection(shown, _wanted(visible), withheld_from(parts, visible))


def project_parts(
    parts: Sequence[Part], selection: ContentSelection, *, beside: Iterable[Part] = ()
) -> PartsProjection:
    """As `project`, for a content slot without roles (AHP-C08)."""
    modes = _Modes(selection, [*beside, *parts])
    shown = tuple(map(modes.view, parts))
    return PartsProjection(shown, _wanted(shown), withheld_from(parts, shown))


class _Modes:
    """The mode of each part, and of each content the strictest of the parts that have it."""

    def __init__(self, selection: ContentSelection, parts: Sequence[Part]) -> None:
        self._selection = selection
        self._by_content: dict[_Content, Mode] = {}
        for part, content in _contents(parts):
            mode = self._by_content.get(content, "body")
            self._by_content[content] = _strictest([mode, selection.view_of(part)])

    def view(self, part: Part) -> Part:
        own: list[Mode] = [part.selection, self._selection.view_of(part)]
        return part.viewed(_strictest([*own, *(self._by_content[c] for _, c in _contents([part]))]))

    def apply(self, message: Message) -> Message:
        return message.model_copy(update={"parts": tuple(map(self.view, message.parts))})


_Content = tuple[str, str]


def _contents(parts: Iterable[Part]) -> Iterator[tuple[Part, _Content]]:
    """The parts that have content, each with it. Empty text says nothing and repeats nothing."""
    return ((part, (part.kind, part.content)) for part in parts if part.content)


def _wanted(parts: Iterable[Part]) -> tuple[AttachmentPart, ...]:
    return tuple(
        part for part in parts if isinstance(part, AttachmentPart) and part.selection == "body"
    )


def withheld_from(original: Iterable[Part], shown: Iterable[Part]) -> tuple[Withheld, ...]:
    """What `original` has, or describes by its digest, and `shown` does not show."""
    visible = {content for _, content in _contents(shown)}
    return tuple(
        _withheld(part)
        for part in original
        if (part.content and (part.kind, part.content) not in visible) or part.sha256 is not None
    )


def _withheld(part: Part) -> Withheld:
    text = part.text if isinstance(part, TextPart) else None
    ref = part.content if isinstance(part, AttachmentPart) else None
    return Withheld(category_of(part), text, ref, part.sha256)


def admit_edit(original: Iterable[Message], edited: Iterable[Message]) -> None:
    """Check the effective messages after an edit against those before it (AHP-C15, C16, C19).

    Removing, reordering and adding messages, and changing text, is what an edit is for. Raises
    Malformed for a reference that the original does not have (`reference_unknown`), a part that
    names other bytes or another media type than before (`reference_rebound`), a part that is known
    by its id or its content and changes its category (`category_changed`), and reasoning that
    leaves its message (`reasoning_moved`).
    """
    known = _Known(original)
    for message in edited:
        for part in message.parts:
            known.check(message, part)


class _Known:
    """The parts before an edit, by id and by content, each with the id of its message."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._parts: dict[_Content, list[tuple[str, Part]]] = {}
        for message in messages:
            for part in message.parts:
                for mark in _marks(part):
                    self._parts.setdefault(mark, []).append((message.id, part))

    def check(self, message: Message, part: Part) -> None:
        if isinstance(part, AttachmentPart) and part.body is not None:
            self._check_body(part, part.body.ref)
        for mark in _marks(part):
            owners = self._parts.get(mark)
            if owners:
                self._check_category(message, part, owners)

    def _check_body(self, part: AttachmentPart, ref: str) -> None:
        same_bytes = self._parts.get(("attachment", ref))
        if not same_bytes:
            raise _edit_refused(
                "reference_unknown",
                "An edit carries only references that the messages had before it.",
                part,
            )
        same_id = self._parts.get(("id", part.id), same_bytes)
        if not _binds(same_id, ref, part.media_type) or not _binds(
            same_bytes, ref, part.media_type
        ):
            raise _edit_refused(
                "reference_rebound",
                "An edit cannot change what a part refers to; upload changed bytes anew.",
                part,
            )

    def _check_category(
        self, message: Message, part: Part, owners: Sequence[tuple[str, Part]]
    ) -> None:
        category = category_of(part)
        if category not in {category_of(owner) for _, owner in owners}:
            raise _edit_refused(
                "category_changed", "An edit cannot change the category of a part.", part
            )
        if category == "reasoning" and message.id not in {owner for owner, _ in owners}:
            raise _edit_refused(
                "reasoning_moved", "Reasoning stays in the message that it belongs to.", part
            )


def _marks(part: Part) -> Iterator[_Content]:
    yield "id", part.id
    yield from (content for _, content in _contents([part]))


def _binds(owners: Sequence[tuple[str, Part]], ref: str, media_type: str) -> bool:
    return any((owner.content, owner.media_type) == (ref, media_type) for _, owner in owners)


def _edit_refused(code: str, message: str, part: Part) -> Malformed:
    return Malformed(code, message, param=part.id[:MAX_PARAM_CHARACTERS])
