"""The tables of rotary and other positions, one row a position, made once when a model is loaded. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..rope_config import RopeConfig
from ..spec import DecoderSpec

Floats = NDArray[np.float32]
GROWN_ROWS = 1024  # computed at a time: 4 ms for two tables of 128 pairs, on the thread that first needs one of them


def short_length(ropes: Iterable[RopeConfig], num_positions: int) -> int:
    """Tokens up to which a sequence has the short factors of "longrope"; 0 if all of `num_positions` tokens have them.

    A decoder's tables then begin with so many rows for short sequences. The rows of long ones, from position 0, follow.
    """
    lengths = (rope.original_max_position for rope in ropes if rope.kind == "longrope")
    return next((length for length in lengths if length < num_positions), 0)


def decoder_tables(ropes: Sequence[RopeConfig], num_positions: int) -> list[tuple[Floats, Floats]]:
    """cos and sin of each of a decoder's kinds, [R, rope.dim / 2] f32; R = `short_length` + `num_positions`."""
    num_short = short_length(ropes, num_positions)
    if not num_short:
        return [rope_tables(rope, num_positions) for rope in ropes]
    return [
        (np.concatenate(both), np.concatenate(other))
        for rope in ropes
        for both, other in [
            zip(rope_tables(rope, num_short), rope_tables(rope, num_positions, is_long=True), strict=True)
        ]
    ]


def rope_tables(
    rope: RopeConfig, num_positions: int, *, is_long: bool = False, first: int = 0
) -> tuple[Floats, Floats]:
    """cos and sin of positions [first, num_positions), [P, rope.dim / 2] f32, times `rope.attention_factor`.

    `is_long`: with the factors of "longrope" for sequences longer than the original context.
    """
    frequencies = inverse_frequencies(rope, is_long=is_long)
    angles = np.arange(first, num_positions, dtype=np.float32)[:, None] * frequencies  # [P, D_rot / 2]
    if rope.kind == "dynamic" and num_positions > rope.original_max_position:
        begin = max(first, rope.original_max_position)
        angles[begin - first :] = _dynamic_angles(rope, begin, num_positions)
    cos, sin = np.cos(angles), np.sin(angles, out=angles)
    for table in (cos, sin):
        table *= np.float32(rope.attention_factor)
    return cos, sin


def tables_bytes(spec: DecoderSpec, num_positions: int) -> int:
    """Memory of a decoder's tables by position: rotary positions, factors of queries, rounded alibi."""
    rotary = sum(2 * (rope.dim // 2) for rope in spec.ropes)
    others = sum(
        (attention.query_temper is not None) + attention.num_heads * attention.is_alibi_rounded
        for attention in set(spec.attentions)
    )
    num_short = short_length(spec.ropes, num_positions)
    return 4 * (num_short * rotary + num_positions * (rotary + others))


class GrowingTables:
    """As `decoder_tables`, with rows that are computed when a sequence first comes so far.

    The tables of 32,768 positions take 64 MiB for Gemma 3 270M, and most servers use few of them. Rows that
    are not computed yet are zero and take no memory. The arrays stay where they are. Thread-safe.
    """

    def __init__(self, ropes: Sequence[RopeConfig], num_positions: int) -> None:
        self._ropes, self._num_positions, self._lock = ropes, num_positions, threading.Lock()
        self._num_short = short_length(ropes, num_positions)
        sizes = [(self._num_short + num_positions, rope.dim // 2) for rope in ropes]
        self.tables = [(np.zeros(size, np.float32), np.zeros(size, np.float32)) for size in sizes]
        self.num_ready = 0  # positions that sequences may have
        for rope, pair in zip(ropes, self.tables, strict=True):
            _fill(pair, 0, rope_tables(rope, self._num_short))
        self.grow(1)

    def grow(self, num_positions: int) -> None:
        """Makes the rows of the positions below `num_positions` ready, and some more."""
        if num_positions <= self.num_ready:
            return
        with self._lock:
            first, last = self.num_ready, min(-(-num_positions // GROWN_ROWS) * GROWN_ROWS, self._num_positions)
            if first >= last:
                return
            for rope, pair in zip(self._ropes, self.tables, strict=True):
                rows = rope_tables(rope, last, is_long=self._num_short > 0, first=first)
                _fill(pair, self._num_short + first, rows)
            self.num_ready = last


def _fill(pair: tuple[Floats, Floats], first: int, rows: tuple[Floats, Floats]) -> None:
    for table, some in zip(pair, rows, strict=True):
        table[first : first + len(some)] = some


def inverse_frequencies(rope: RopeConfig, *, is_long: bool = False) -> Floats:
    """Radians per position of each rotated pair, [dim / 2] f32. Those of "dynamic" are for the trained length.

    `is_long`: for sequences longer than the original context, which "longrope" has factors of its own for.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    powers = np.float64(rope.theta) ** exponents  # in double precision and rounded once, to match torch's power
    plain: Floats = np.float32(1.0) / powers.astype(np.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = np.array(rope.long_factors if is_long else rope.short_factors, np.float32)
        stretched: Floats = np.float32(1.0) / (factors * powers.astype(np.float32))
        return stretched
    if rope.kind == "proportional":
        plain[rope.num_turned :] = 0
        return plain / rope.factor
    return plain


def _dynamic_angles(rope: RopeConfig, first: int, last: int) -> Floats:
    """The angles of positions [first, last) beyond the trained length, [last - first, dim / 2].

    The base grows with the length of the sequence. That is the length up to each position, as in transformers, where
    keys in the cache keep the angles of the step that computed them.
    """
    positions = np.arange(first, last, dtype=np.float64)[:, None]
    stretch = rope.factor * (positions + 1) / rope.original_max_position - (rope.factor - 1)
    bases = rope.theta * stretch ** (rope.dim / (rope.dim - 2))  # [P, 1]
    frequencies = (1 / bases ** (np.arange(0, rope.dim, 2) / rope.dim)).astype(np.float32)
    return positions.astype(np.float32) * frequencies


def _llama3(rope: RopeConfig, plain: Floats) -> Floats:
    """Short waves stay, long waves are stretched by `factor`, and waves between are blended by wavelength."""
    wavelengths = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    kept_share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept_share) * plain / rope.factor + kept_share * plain
    stretched = np.where(wavelengths > shortest_stretched, plain / rope.factor, plain)
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return np.where(is_between, blended, stretched)


def _yarn(rope: RopeConfig, plain: Floats) -> Floats:
    """Pairs that rotate often in the original context stay, those that rotate rarely are stretched; a ramp between."""

    def pair_that_turns(times: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high if high != low else high + 0.001
    stretched_share = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    stretched: Floats = plain / rope.factor * stretched_share + plain * (1 - stretched_share)
    return stretched.astype(np.float32)


def query_factors(strength: float, trained_length: int, num_positions: int) -> Floats:
    """Factors of the queries by position, [num_positions] f32: 1 + strength * ln(1 + position // trained_length)."""
    steps = np.arange(num_positions) // trained_length
    factors: Floats = (1 + strength * np.log1p(steps)).astype(np.float32)
    return factors


def alibi_slopes(num_heads: int) -> Floats:
    """The slope of each head's linear bias, [H] f32: 2 ** (-8 i / H); other counts than powers of two take halves."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * (num_heads - power), 2))
    return np.concatenate([slopes, between]).astype(np.float32)
