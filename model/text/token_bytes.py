"""The bytes that each token of a vocabulary adds to a text."""

from __future__ import annotations

from collections.abc import Sequence

SPACE = "▁"
SEPARATOR = "\0"  # in no token but that of the byte zero


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside the substitute alphabet is itself as UTF-8."""
    try:
        return token.translate(LATIN_1_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token that spells text with "▁" for a space, or one byte as `<0xNN>`."""
    if is_byte_token(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def is_byte_token(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    return all(character in "0123456789abcdefABCDEF" for character in token[3:5])


def byte_level_table(tokens: Sequence[str | None]) -> list[bytes]:
    """`byte_level_bytes` of each token; b"" for None."""
    return [byte_level_bytes(token) if token else b"" for token in tokens]


def sentencepiece_table(tokens: Sequence[str | None]) -> list[bytes]:
    """`sentencepiece_bytes` of each token, all of which are spelled in one step, a tenth of the time; b"" for None."""
    table = SEPARATOR.join([token or "" for token in tokens]).replace(SPACE, " ").encode().split(SEPARATOR.encode())
    if len(table) != len(tokens):  # a token has the separator, or there is none
        return [sentencepiece_bytes(token) if token else b"" for token in tokens]
    for index in byte_tokens(tokens):
        table[index] = sentencepiece_bytes(tokens[index] or "")
    return table


def byte_tokens(tokens: Sequence[str | None]) -> list[int]:
    """The ids of the tokens `<0xNN>`."""
    return [index for index, token in enumerate(tokens) if token and token[0] == "<" and is_byte_token(token)]


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters are their own bytes; the others are from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


# Other characters below U+0100 map to one outside Latin-1, so that encoding them fails.
LATIN_1_OF_CHARACTER = dict.fromkeys(range(256), "\u0100") | {
    ord(character): chr(byte) for character, byte in _byte_alphabet().items()
}
