"""Values kept from layer to layer."""

from __future__ import annotations

import torch

from millrace.kernels.reference.per_step import MAX_KINDS, PerStepCache


def test_a_value_is_kept_as_long_as_its_inputs_hold_the_same_numbers() -> None:
    kept, made = PerStepCache[int](), iter(range(100))
    numbers = torch.tensor([1, 2, 3])

    def get() -> int:
        return kept.get("key", (numbers,), lambda: next(made))

    assert [get(), get()] == [0, 0]
    numbers[1] = 7  # in place
    assert [get(), get()] == [1, 1]
    numbers = numbers.clone()
    assert get() == 1
    numbers = numbers[:2]
    assert get() == 2
    numbers = numbers.int()
    assert get() == 3


def test_keys_keep_values_of_their_own() -> None:
    kept, numbers = PerStepCache[str](), torch.tensor([1])
    assert kept.get("a", (numbers,), lambda: "a") == "a"
    assert kept.get("b", (numbers,), lambda: "b") == "b"
    assert kept.get("a", (numbers,), lambda: "c") == "a"


def test_values_of_bygone_keys_are_dropped() -> None:
    kept, numbers = PerStepCache[int](), torch.tensor([1])
    for key in range(10 * MAX_KINDS):
        kept.get(key, (numbers,), lambda key=key: key)  # type: ignore[misc]
    assert len(kept._kept) <= MAX_KINDS
