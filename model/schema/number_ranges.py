"""Regular expressions of the JSON numbers in a range: exact at any size, as text and not as floating-point numbers.

A number has at most `MAX_DIGITS` before its point, or as many as its bounds, and some `MAX_PLACES` behind it: a model
that has begun a row of digits may never end it. The expressions are Rust's and Python's syntax alike.
"""

from __future__ import annotations

from decimal import Decimal

MAX_DIGITS = 40
MAX_PLACES = 20  # a double has 17 significant digits

WHOLE = f"-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_MORE = f"[0-9]{{0,{MAX_PLACES}}}"
_FRACTION = rf"(\.[0-9]{{1,{MAX_PLACES}}})?"
_ZEROS = rf"(\.0{{1,{MAX_PLACES}}})?"
_MORE_ZEROS = f"0{{0,{MAX_PLACES}}}"
# at most 1e299, as larger ones are infinite to many readers
NUMBER = WHOLE + _FRACTION + r"([eE]([+-]?0?[0-9]{1,2}|-[12][0-9]{2}|\+?(1[0-9]{2}|2[0-5][0-9])))?"


def integer_range(low: int | None, high: int | None) -> str | None:
    """Matches the whole numbers of [low, high]; None stands for no bound. Returns None if there are none."""
    if low is not None and high is not None and low > high:
        return None
    if low is None and high is None:
        return WHOLE
    parts = []
    if low is None or low < 0:
        most = None if low is None else -low
        parts.append("-" + _from_zero_up(1 if high is None or high >= 0 else -high, most))
    if high is None or high >= 0:
        parts.append(_from_zero_up(max(low or 0, 0), high))
    return _any_of(parts)


def decimal_range(
    low: Decimal | None, high: Decimal | None, is_low_in: bool = True, is_high_in: bool = True
) -> str | None:
    """Matches the decimals from `low` to `high`, with or without the bounds. Returns None if there are none.

    They are written without an exponent, but for those of no bounds.

    NOTE: `-low` would round to the context's 28 digits.
    """
    if low is not None and high is not None and (low > high or (low == high and not (is_low_in and is_high_in))):
        return None
    if low is None and high is None:
        return NUMBER
    parts = []
    if low is None or low < 0:  # below zero: the mirror image, above zero
        most = None if low is None else low.copy_negate()
        if high is not None and high < 0:
            parts.append(_positive(high.copy_negate(), most, is_high_in, is_low_in))
        else:
            parts.append(_positive(Decimal(0), most, False, is_low_in))
        parts = ["-" + part for part in parts if part is not None]
    if high is None or high > 0 or (high == 0 and is_high_in):
        is_above = low is not None and low >= 0
        least = low if low is not None and is_above else Decimal(0)
        part = _positive(least, high, is_low_in if is_above else True, is_high_in)
        parts += [] if part is None else [part]
    return _any_of([part for part in parts if part is not None]) if parts else None


# -- whole numbers


def _from_zero_up(low: int, high: int | None) -> str:
    """The whole numbers of [low, high], where 0 <= low <= high."""
    first, parts = str(low), []
    if high is None:
        parts = _same_length(first, "9" * len(first))
        return _any_of([*parts, f"[1-9][0-9]{{{len(first)},{max(len(first), MAX_DIGITS - 1)}}}"])
    last = str(high)
    if len(first) == len(last):
        return _any_of(_same_length(first, last))
    parts = _same_length(first, "9" * len(first))
    if len(last) - len(first) > 1:
        fewest, most = len(first), len(last) - 2  # digits after the first
        parts.append(f"[1-9][0-9]{{{fewest},{most}}}")
    return _any_of(parts + _same_length("1" + "0" * (len(last) - 1), last))


def _same_length(low: str, high: str) -> list[str]:
    """The digits from `low` to `high`, which are of one length."""
    if not low:
        return [""]
    if low[0] == high[0]:
        return [low[0] + _any_of(_same_length(low[1:], high[1:]))]
    num_rest = len(low) - 1
    first, last, parts, ends = int(low[0]), int(high[0]), [], []
    if low[1:].strip("0"):
        parts.append(low[0] + _any_of(_same_length(low[1:], "9" * num_rest)))
        first += 1
    if high[1:].strip("9"):
        ends.append(high[0] + _any_of(_same_length("0" * num_rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(_digit(first, last) + _digits(num_rest))
    return parts + ends


def _digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _any_of(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


# -- decimals


def _positive(low: Decimal, high: Decimal | None, is_low_in: bool, is_high_in: bool) -> str | None:
    """The decimals from `low` to `high`, where 0 <= low."""
    whole, fraction = _split(low)
    top, top_fraction = (None, "") if high is None else _split(high)
    if whole == top:
        tail = _between(fraction, top_fraction, is_low_in, is_high_in)
        return None if tail is None else f"{whole}{tail}"
    parts = [f"{whole}{_from(fraction, is_low_in)}"]
    if top is None or whole + 1 < top:
        parts.append(_from_zero_up(whole + 1, None if top is None else top - 1) + _FRACTION)
    if top is not None and (up_to := _up_to(top_fraction, is_high_in)) is not None:
        parts.append(f"{top}{up_to}")
    return _any_of(parts)


def _split(number: Decimal) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at their end."""
    whole, _, fraction = format(number, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _from(fraction: str, is_in: bool) -> str:
    """What may follow a whole part: the fractions from 0.`fraction` on, of which none stands for zero."""
    return _FRACTION if is_in and not fraction else r"\." + _digits_from(fraction, is_in)


def _digits_from(fraction: str, is_in: bool) -> str:
    if not fraction:
        return _MORE if is_in else f"{_MORE}[1-9]{_MORE}"
    parts = [fraction[0] + _digits_from(fraction[1:], is_in)]
    if fraction[0] != "9":
        parts.append(_digit(int(fraction[0]) + 1, 9) + _MORE)
    return _any_of(parts)


def _up_to(fraction: str, is_in: bool) -> str | None:
    """What may follow a whole part: the fractions up to 0.`fraction`."""
    if not fraction:
        return _ZEROS if is_in else None
    return rf"(\.{_digits_up_to(fraction, is_in)})?"


def _digits_up_to(fraction: str, is_in: bool) -> str:
    """One digit or more. `fraction` is not empty, and its last digit is not zero."""
    parts = [] if fraction[0] == "0" else [_digit(0, int(fraction[0]) - 1) + _MORE]
    if len(fraction) > 1:
        parts.append(f"{fraction[0]}({_digits_up_to(fraction[1:], is_in)})?")
    elif is_in:
        parts.append(fraction + _MORE_ZEROS)
    return _any_of(parts)


def _between(low: str, high: str, is_low_in: bool, is_high_in: bool) -> str | None:
    """What may follow a whole part: the fractions from 0.`low` to 0.`high`, where low <= high."""
    if low == high:
        return (rf"\.{low}{_MORE_ZEROS}" if low else _ZEROS) if is_low_in and is_high_in else None
    if not low and is_low_in:
        return _up_to(high, is_high_in)
    return r"\." + _digits_between(low, high, is_low_in, is_high_in)


def _digits_between(low: str, high: str, is_low_in: bool, is_high_in: bool) -> str:
    """The digits from `low` to `high`, where 0.`low` < 0.`high`; none at all if `low` is empty and in."""
    if not low and is_low_in:
        return f"({_digits_up_to(high, is_high_in)})?"
    first, last = int(low[:1] or "0"), int(high[0])
    if first == last:
        rest = _digits_between(low[1:], high[1:], is_low_in, is_high_in)
        return f"{first}{rest}"
    parts = [f"{first}{_digits_from(low[1:], is_low_in)}"]
    if first + 1 < last:
        parts.append(_digit(first + 1, last - 1) + _MORE)
    if len(high) > 1:
        parts.append(f"{last}({_digits_up_to(high[1:], is_high_in)})?")
    elif is_high_in:
        parts.append(f"{last}{_MORE_ZEROS}")
    return _any_of(parts)
