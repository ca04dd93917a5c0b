"""Tokens as the native library chooses them, against the definition in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.slot_step import NativeChooser
from millrace.stages.sample.logit_edits import allow_only
from millrace.stages.sample.sampling_math import uniform
from tests.kernels.draw_rows import draw_rows, kept_weights
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

SIZES = (5, 128, 1_000, 49_152)  # of vocabularies: one block and less, an odd tail, a real one
NUM_ROWS = 24


@cache
def model() -> NativeModel:
    return Checkpoint.random().load(num_threads=2)


def choose(logits: Array, is_random: bool = True, u: Any = 0.0, **asked: Any) -> tuple[Array, Array]:
    """Each row asks for the same, unless an array says otherwise; it is a slot's, in falling order."""
    count = len(logits)
    slots, places, prompt = np.arange(count)[::-1], np.arange(count) * 3, np.arange(count, dtype=np.int32) * 7
    masked = {name: asked.pop(name) for name in ("masks", "mask_rows") if name in asked}
    positions = prompt[slots] + places
    draws = np.ascontiguousarray(draw_rows(count, **asked)[slots])
    seeds = seeds_for(np.broadcast_to(u, count), positions)[slots]
    chooser = NativeChooser(model(), is_random=np.full(count, is_random), seeds=seeds, num_prompt=prompt, draws=draws)
    return chooser.choose(logits.astype(np.float32), slots, places, **masked)


def seeds_for(u: Array, positions: Array) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The seeds that make `u` [n] of these positions, in 53 bits: the way of `uniform` backwards."""
    stream = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    seeds = unmixed(unmixed((u * 2**53).astype(np.uint64) << np.uint64(11)) - stream)
    assert np.array_equal(uniform(seeds, positions), np.floor(u * 2**53) / 2**53)
    return seeds


def unmixed(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """What SplitMix64 mixes to z."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        z = z ^ (z >> np.uint64(shift)) ^ (z >> np.uint64(2 * shift))
        z = z * np.uint64(pow(factor, -1, 2**64))
    return z


def rows(size: int, seed: int = 0) -> Array:
    """Flat ones, peaked ones, and some with many tokens that cannot be chosen."""
    draw = np.random.default_rng(seed)
    logits = draw.standard_normal((NUM_ROWS, size)) * np.geomspace(0.05, 12, NUM_ROWS)[:, None]
    logits[::5] = np.where(draw.random((len(logits[::5]), size)) < 0.5, -np.inf, logits[::5])
    logits[:, 3] = 0.5
    return logits.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_lowest_id_of_the_likeliest(size: int) -> None:
    logits = rows(size)
    logits[4, [2, size - 1]] = 99.0
    token_ids, is_broken = choose(logits, is_random=False)
    assert token_ids.tolist() == logits.argmax(1).tolist() and token_ids[4] == 2 and not is_broken.any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 500, "temperature": 2.0},
        {"top_p": 0.95},
        {"top_p": 0.1, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_n_sigma": 1.0},
        {"typical_p": 0.6},
        {"typical_p": 0.3, "temperature": 2.5},
        {"typical_p": 0.95, "top_k": 50, "top_n_sigma": 2.5},
        {"top_n_sigma": 2.5, "top_p": 0.9, "temperature": 3.0},
        {"top_k": 60, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    ],
    ids=str,
)
def test_a_token_is_the_first_whose_share_of_what_is_kept_is_above_u(size: int, asked: dict[str, Any]) -> None:
    logits, u = rows(size), np.random.default_rng(1).random(NUM_ROWS)
    u[:3] = 0.0, 1 - 2**-53, 0.5
    token_ids, is_broken = choose(logits, u=u, **asked)
    assert not is_broken.any()
    for row, token_id, target in zip(logits, token_ids, u, strict=True):
        weights = kept_weights(row, **asked)
        sums = weights.cumsum() / weights.sum()
        assert weights[token_id] > 0
        assert sums[token_id] - weights[token_id] / weights.sum() - 1e-5 <= target <= sums[token_id] + 1e-5


HEAPS: dict[str, Any] = {
    "flat": lambda draw, size: draw.standard_normal(size),
    "peaked": lambda draw, size: np.append(draw.standard_normal(size - 1) * 2.5, 18.0),
    "a word list's": lambda draw, size: -1.3 * np.log(np.arange(1, size + 1)) + draw.standard_normal(size) * 0.3,
    "all but equal": lambda draw, size: np.nextafter(np.float32(3), np.float32(draw.integers(2, size=size) * 9)),
    "of two values": lambda draw, size: draw.integers(2, size=size) * 1e-3,
    "of the smallest there are": lambda draw, size: draw.integers(-1, 3, size=size) * 1.401298464324817e-45,
    "far apart": lambda draw, size: draw.standard_normal(size) * 400,
    "mostly hidden": lambda draw, size: np.where(draw.random(size) < 0.999, -np.inf, draw.standard_normal(size)),
}


@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("heap", HEAPS)
def test_top_p_ends_at_the_token_before_which_less_than_its_share_has_been_seen(heap: str, temperature: float) -> None:
    """From the unlikeliest on, so that u = 0 takes the last one kept."""
    size, shares = 20_000, np.array([0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9])
    logits = np.sort(HEAPS[heap](np.random.default_rng(size), size).astype(np.float32))
    token_ids, _ = choose(np.tile(logits, (len(shares), 1)), temperature=temperature, top_p=shares)
    falling = logits[::-1].astype(np.float64)
    weights = np.exp((falling - falling[0]) / temperature)
    weights[weights < 1e-37] = 0  # as good as none in float32
    before = (weights.cumsum() - weights) / weights.sum()
    for token_id, share in zip(token_ids, shares, strict=True):
        ties = np.flatnonzero(falling == falling[size - 1 - token_id])
        assert ties[-1] == size - 1 - token_id, "all that tie with the last one are kept"
        assert weights[ties[0]] > 0 and before[ties[0]] <= share + 1e-6, "more is kept than it takes"
        assert ties[-1] + 1 == size or before[ties[-1] + 1] >= share - 1e-6, "less is kept than it takes"


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = np.array([[2.0, 1.0, 1.0, 1.0, 0.0]] * 200, np.float32)
    u = np.arange(200) / 200
    for asked in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": float(np.exp(-1.0)) - 1e-6}):
        assert set(choose(logits, u=u, **asked)[0].tolist()) == {0, 1, 2, 3}
    assert set(choose(logits, u=u, top_k=1)[0].tolist()) == {0}
    assert set(choose(logits, u=u, min_p=1.0)[0].tolist()) == {0}


def test_rows_without_a_finite_maximum_are_broken_and_the_others_are_not() -> None:
    logits = rows(300)
    logits[1], logits[2, 299], logits[3, 7], logits[5, 7] = -np.inf, np.nan, np.inf, -np.inf
    for is_random in (False, True):
        token_ids, is_broken = choose(logits, is_random=is_random, top_p=0.9, u=0.5)
        assert np.flatnonzero(is_broken).tolist() == [1, 2, 3] and not token_ids[1:4].any()


def test_a_rows_token_depends_on_that_row_only() -> None:
    logits, u = rows(1_000), np.random.default_rng(2).random(NUM_ROWS)
    asked = {
        "temperature": np.linspace(0.2, 3.0, NUM_ROWS),
        "top_k": np.arange(NUM_ROWS) % 4 * 30,
        "top_p": np.where(np.arange(NUM_ROWS) % 3, 0.9, 1.0),
        "min_p": np.where(np.arange(NUM_ROWS) % 5, 0.0, 0.01),
    }
    together = choose(logits, u=u, **asked)[0]
    for i in range(NUM_ROWS):
        alone = choose(logits[i : i + 1], u=u[i], **{name: values[i] for name, values in asked.items()})[0]
        assert alone[0] == together[i]


def test_drawn_tokens_are_spread_as_their_probabilities() -> None:
    logits = np.array([[0.0, 1.0, 2.0, -1.0, 0.5]] * 1000, np.float32)
    counts = np.bincount(choose(logits, u=(np.arange(1000) + 0.5) / 1000)[0], minlength=5)
    assert np.abs(counts / 1000 - np.exp(logits[0]) / np.exp(logits[0]).sum()).max() < 0.002


WAYS: tuple[dict[str, Any], ...] = (
    {"is_random": False},
    {"u": 0.3},
    {"u": 0.999, "temperature": 0.5, "top_p": 0.9},
    {"u": 0.7, "top_k": 40},  # more than some masks allow
    {"u": 0.1, "top_k": 3, "top_p": 0.6, "min_p": 0.01},
)


def masks_of(size: int, draw: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int32]]:
    """All tokens but few, few tokens, all of some blocks and none of others, half of them, and none; bits past the
    last token are set, and say nothing."""
    bits = draw.random((5, size)) < np.array([0.99, 0.01, 1.0, 0.5, 0.0])[:, None]
    bits[1, size // 2], bits[2] = True, np.arange(size) // 128 % 3 == 0
    padded = np.ones((5, (size // 32 + 2) * 32), np.bool_)
    padded[:, :size] = bits
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("size", (5, 31, 32, 33, 1_000, 49_152))
def test_tokens_without_a_bit_are_not_chosen_and_do_not_count(size: int, way: dict[str, Any]) -> None:
    """As if numpy had hidden them before: NaN and infinities among them, and rows without a mask."""
    draw = np.random.default_rng(size)
    logits = (draw.standard_normal((12, size)) * 3).astype(np.float32)
    logits[:5, :: max(1, size // 7)] = np.array([np.nan, np.inf, -np.inf, 1e30, 5.0], np.float32)[:, None]
    masks = masks_of(size, draw)
    mask_rows = np.array([4, 3, 2, 1, 0, -1, 0, 1, -1, 2, 3, 4])
    expected = logits.copy()
    guided = np.flatnonzero(mask_rows >= 0)
    allow_only(expected, guided, masks[mask_rows[guided]])
    token_ids, is_broken = choose(expected.copy(), **way)
    found_ids, found_broken = choose(logits.copy(), **way, masks=masks, mask_rows=mask_rows)
    assert found_ids.tolist() == token_ids.tolist() and found_broken.tolist() == is_broken.tolist()
    assert is_broken[[0, 11]].all() and not is_broken[5:9].any()
    kept = np.isfinite(expected[np.arange(12), found_ids])
    assert kept[~found_broken].all()


def test_masks_of_too_few_bits_are_refused_and_rows_of_masks_that_are_not_there() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(AssertionError, match="masks of 1000 tokens"):
        choose(rows(1_000)[:1], masks=np.zeros((1, 31), np.int32), mask_rows=one)
    with pytest.raises(AssertionError, match="of 1 masks"):
        choose(rows(1_000)[:1], masks=np.zeros((1, 32), np.int32), mask_rows=one + 1)
