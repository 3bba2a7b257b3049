"""`consignee token`: bearer tokens for the configuration."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Final

import click

from app.commands.options import Source, configured

TOKEN_BYTES: Final = 32
"""Randomness of a fresh token: 256 bits, so that its bare SHA-256 can be kept."""


@click.group()
def token() -> None:
    """Bearer tokens for the configuration."""


@token.command()
@click.option("--name", default="example", show_default=True, help="Its principal and scope.")
@configured
def new(source: Source, name: str) -> None:
    """Make a token, and print it with what the configuration needs of it.

    Nothing keeps the token: only its SHA-256 belongs in the configuration.
    """
    del source
    made = fresh_token()
    quoted = json.dumps(name, ensure_ascii=False)  # a JSON string is a TOML basic string, too
    click.echo(
        f"token:   {made}\n"
        f"SHA-256: {digest_of(made)}\n\n"
        "[[tokens]]\n"
        f"name = {quoted}\n"
        f'token_sha256 = "{digest_of(made)}"\n'
        f"scope = {quoted}\n"
        'permissions = ["ahp.upload"]'
    )


def fresh_token() -> str:
    """A random bearer token that says what it is for."""
    return f"cst_{secrets.token_urlsafe(TOKEN_BYTES)}"


def digest_of(value: str) -> str:
    """The SHA-256 by which a token is configured: 64 lowercase hex."""
    return hashlib.sha256(value.encode("ascii")).hexdigest()
