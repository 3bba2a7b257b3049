"""Parameters of header values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.parameters import ParameterError, parse_parameters


def test_a_value_and_its_parameters() -> None:
    head, parameters = parse_parameters('Form-Data; NAME="a;b" ; filename=x.txt;')
    assert head == "form-data"
    assert {name: value.text for name, value in parameters.items()} == {
        "name": "a;b",
        "filename": "x.txt",
    }
    assert parse_parameters("inline") == ("inline", {})
    assert parse_parameters("inline ; ") == ("inline", {})


@pytest.mark.requirement("B24")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r'"C:\dir\f.txt"', r"C:\dir\f.txt"),
        (r'"a\"b.txt"', 'a"b.txt'),
        (r'"a\\b.txt"', r"a\b.txt"),
        (r'"dir\\"', "dir\\"),
        ('""', ""),
        (r"a\\b", r"a\\b"),
    ],
)
def test_only_quotes_and_backslashes_are_escaped(written: str, meant: str) -> None:
    _, parameters = parse_parameters(f"form-data; filename={written}")
    assert parameters["filename"].unescaped() == meant


@pytest.mark.parametrize(
    "value",
    ["a; b", "a; b=", "a; =c", 'a; b="c', 'a; b="c"d', "a; b=c; B=d", 'a; b="\r\n"', "a;;b=c"],
)
def test_what_does_not_fit_is_refused(value: str) -> None:
    with pytest.raises(ParameterError):
        parse_parameters(value)


@given(st.text())
def test_any_text_is_read_or_refused(value: str) -> None:
    try:
        head, parameters = parse_parameters(value)
    except ParameterError:
        return
    assert head == head.strip(" \t")
    assert all(name == name.lower() for name in parameters)
