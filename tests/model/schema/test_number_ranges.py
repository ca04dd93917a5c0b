"""Expressions of number ranges against plain comparison."""

from __future__ import annotations

import random
import re
from decimal import Decimal

import pytest

from millrace.model.schema.number_ranges import decimal_range, integer_range
from tests.counts import count

NUM_RANGES = count(150, 5000)


@pytest.mark.parametrize("num_digits", [1, 3, 25])
def test_a_whole_number_matches_if_and_only_if_it_is_in_the_range(num_digits: int) -> None:
    draw = random.Random(num_digits)
    most = 10**num_digits
    for _ in range(NUM_RANGES):
        low, high = (draw.choice([None, draw.randint(-most, most), draw.randint(-12, 12)]) for _ in range(2))
        pattern = integer_range(low, high)
        known = {-100, -99, -10, -9, -1, 0, 1, 9, 10, 99, 100, *(draw.randint(-most, most) for _ in range(5))}
        for bound in {low, high} - {None}:
            known |= {bound - 1, bound, bound + 1, -bound, bound * 10, bound // 10, bound + 10, bound - 10}
        for number in known:
            is_in = (low is None or low <= number) and (high is None or number <= high)
            matches = pattern is not None and re.fullmatch(pattern, str(number)) is not None
            assert matches == is_in, (low, high, number, pattern)


@pytest.mark.parametrize("num_places", [0, 1, 4])
def test_a_decimal_matches_if_and_only_if_it_is_in_the_range(num_places: int) -> None:
    draw = random.Random(num_places)

    def number() -> Decimal:
        return Decimal(draw.choice([draw.randint(-25 * 10**num_places, 25 * 10**num_places), 0])).scaleb(-num_places)

    for _ in range(NUM_RANGES):
        low, high = (draw.choice([None, number()]) for _ in range(2))
        is_low_in, is_high_in = draw.random() < 0.5, draw.random() < 0.5
        pattern = decimal_range(low, high, is_low_in, is_high_in)
        known = {Decimal("0.01"), Decimal("-0.05"), Decimal("1.0"), *(number() for _ in range(5))}
        for bound in {low, high} - {None}:
            steps = [Decimal(1).scaleb(-places) for places in (0, 1, num_places + 1)]
            known |= {bound, -bound, *(bound + step for step in steps), *(bound - step for step in steps)}
        for value in known:
            is_in = low is None or value > low or (is_low_in and value == low)
            is_in = is_in and (high is None or value < high or (is_high_in and value == high))
            text = format(value or Decimal(0), "f")
            matches = pattern is not None and re.fullmatch(pattern, text) is not None
            assert matches == is_in, (low, high, is_low_in, is_high_in, text, pattern)


def test_numbers_have_one_spelling_of_their_whole_part() -> None:
    for text in ("01", "-01", "00", "+1", "1.", ".5", "-", ""):
        assert not re.fullmatch(integer_range(-50, 50) or "", text)
        assert not re.fullmatch(decimal_range(Decimal(-50), Decimal(50)) or "", text)
