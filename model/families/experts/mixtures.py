"""What several families with experts make of a config.json: counts, layers with and without experts, stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...config_keys import ConfigKeys
from ...spec import FeedSpec, LayerSpec, MoeSpec, RouterSpec
from ..building import feed
from ..names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, Names, Rows, stacked
from ..reading import renamed

MOST_EXPERTS = 4096  # of a layer; the largest published models have some 500


def mixture(
    keys: ConfigKeys,
    router: RouterSpec,
    *,
    num_experts: int | None,
    top_k: int | None,
    inner: int | None = None,
    size: str = "moe_intermediate_size",
    **changes: Any,
) -> MoeSpec:
    """The experts of a layer. `changes`: fields of `MoeSpec`.

    `num_experts`, `top_k` and `inner` are the defaults of num_experts, num_experts_per_tok and `size`; None: the keys
    have to be there.
    """
    count, chosen = keys.count("num_experts", num_experts, most=MOST_EXPERTS), keys.count("num_experts_per_tok", top_k)
    if count % router.groups:
        keys.fail("n_group", f"must divide the {count} experts, but is {router.groups}")
    if router.groups_kept > router.groups:
        keys.fail("topk_group", f"must be at most n_group = {router.groups}, but is {router.groups_kept}")
    if chosen > count // router.groups * router.groups_kept:
        there = "there are" if router.groups == 1 else f"{router.groups_kept} groups of {router.groups} have"
        most = count // router.groups * router.groups_kept
        keys.fail("num_experts_per_tok", f"must be at most {most}, as many as {there}, but is {chosen}")
    expert = changes.pop("expert", None) or feed(keys, size=size, inner=inner)
    return MoeSpec(num_experts=count, top_k=chosen, expert=expert, router=router, **changes)


def under_either_name(keys: ConfigKeys, name: str, *others: str) -> ConfigKeys:
    """The keys with `name` for what the file may call by one of `others`."""
    stored = next((other for other in others if keys.values.get(other) is not None), None)
    return keys if stored is None or keys.values.get(name) is not None else renamed(keys, {name: stored})


def in_some_layers(layers: Iterable[LayerSpec], moe: MoeSpec, has_experts: Callable[[int], bool]) -> list[LayerSpec]:
    """The layers, with experts in place of the feed where `has_experts` holds for the number of the layer."""
    return [replace(layer, feed=moe) if has_experts(index) else layer for index, layer in enumerate(layers)]


def listed_layers(keys: ConfigKeys, key: str, num_layers: int) -> Sequence[int]:
    """The numbers of layers that a key lists; those behind the last have no effect."""
    listed = keys.values.get(key)
    if listed is None:
        return ()
    if not isinstance(listed, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        keys.fail(key, f"must list numbers of the {num_layers} layers")
    return listed


def stacked_names(moe: MoeSpec, gate_up: str, down: str, *, suffix: str | None = None) -> Names:
    """Experts of two tensors: gate and up as halves of [E, 2 I, hidden], and down [E, hidden, I].

    `gate_up` and `down` are stems in the file; `suffix`: as in `Rows`.
    """
    stack = Rows(down, num_stacked=moe.num_experts, suffix=suffix)
    gate, up = stacked(moe.expert.intermediate_size, moe.expert.intermediate_size)
    halves = {EXPERT_GATE: replace(stack, stem=gate_up, rows=gate), EXPERT_UP: replace(stack, stem=gate_up, rows=up)}
    return {**halves, EXPERT_DOWN: stack}


def shared_feed(keys: ConfigKeys, size: int) -> FeedSpec | None:
    """The network that all tokens go through; None of size 0."""
    return feed(keys, inner=size, intermediate_size=size) if size else None
