"""Reading WWW-Authenticate: several schemes, quoted strings, commas, nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sender.challenges import Challenge, bearer_parameters, parse_challenges

WORDS = st.text("abcXYZ09-._~!", min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


def quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def written(challenge: Challenge) -> str:
    pairs = ", ".join(f"{name}={quoted(value)}" for name, value in challenge.parameters.items())
    return f"{challenge.scheme} {pairs}".strip()


@given(
    st.lists(
        st.builds(
            Challenge,
            WORDS.map(str.lower),
            st.dictionaries(WORDS.map(str.lower), VALUES, max_size=4),
        ),
        max_size=4,
    )
)
def test_what_is_written_is_read(challenges: list[Challenge]) -> None:
    assert parse_challenges(", ".join(map(written, challenges))) == challenges


@given(st.text(max_size=60))
def test_anything_is_read_or_refused(value: str) -> None:
    try:
        found = parse_challenges(value)
    except ValueError:
        return
    assert all(challenge.scheme == challenge.scheme.lower() for challenge in found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        (" , ,", []),
        ("Negotiate", [("negotiate", {})]),
        ("Negotiate YWJj==", [("negotiate", {})]),
        ("Negotiate a=, Bearer", [("negotiate", {}), ("bearer", {})]),
        (
            "Basic realm=x, Bearer Realm = y",
            [("basic", {"realm": "x"}), ("bearer", {"realm": "y"})],
        ),
        ('Bearer realm="a, b=c"', [("bearer", {"realm": "a, b=c"})]),
        (r'Bearer realm="a \"b\" \\"', [("bearer", {"realm": r'a "b" \ '.strip()})]),
        ("Basic, , Bearer\ta=b", [("basic", {}), ("bearer", {"a": "b"})]),
    ],
)
def test_forms_that_servers_send(value: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert [(c.scheme, c.parameters) for c in parse_challenges(value)] == expected


@pytest.mark.parametrize(
    "value",
    [
        'Bearer realm="open',
        "realm=x",
        "Bearer a=1, A=2",
        "Bearer a=b c",
        'Bearer a="b"c',
        "Bearer =x",
        "Bearer (a)",
        "\x00",
        "Bearer a=\u00e9",
    ],
)
def test_what_is_malformed_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_challenges(value)


def test_the_bearer_challenge_that_points_to_metadata_comes_first() -> None:
    value = 'DPoP a=b, Bearer realm="x", bEaReR resource_metadata="https://r.test/m", Basic c=d'
    assert bearer_parameters(value) == {"resource_metadata": "https://r.test/m"}
    assert bearer_parameters('Bearer realm="x"') == {"realm": "x"}
    assert bearer_parameters("Basic realm=x") == {}
