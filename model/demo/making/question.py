# ruff: noqa: E501  a question and its answer stay on one line, to be read as one
"""A question with its answer, and the key of the split rule."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """One turn of a chat. `expect` is what a right answer contains, in lower case; empty if more than one answer is right."""

    text: str
    answer: str
    expect: str = ""
    key: tuple[str, ...] = ()


def key_of(question: Question) -> tuple[str, ...]:
    """The key of the split rule. Case, punctuation and spelling do not count, so that no variant of a held-out question is trained."""
    if question.key:
        return question.key
    plain = question.text.lower().replace("color", "colour")
    return ("".join(c if c.isalnum() else " " for c in plain).strip(),)
