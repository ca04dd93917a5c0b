"""Whether engines may serve the requests of one front: those that stand in for each other are alike in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..errors import ConfigError
from ..fleet.hosts import SAME
from ..split.protocol import EngineReady
from ..traffic.traffic_rules import TrafficRules

WEIGHTS = (".safetensors", ".safetensors.index.json")  # ends of names of files: a front reads all others
SETTINGS = ("max_num_seqs", "enable_prefix_caching", "steps_in_flight")  # that a front must know
FACTS = ("vocab_size", "block_size")

ADVICE = "start both with the same {}"
SPLIT = "start both with the same {}, or label one and keep them apart by --split"


def check_alike(names: Sequence[str], ready: Sequence[EngineReady], rules: TrafficRules | None = None) -> None:
    """Raises `ConfigError` if engines differ: those of one group of `rules` in anything, others in what fronts know.

    Other groups may have other weights: no answer goes on there that another group has begun.
    """
    rules = TrafficRules() if rules is None else rules
    firsts: dict[str, int] = {}  # by group
    for index, one in enumerate(ready):
        first = firsts.setdefault(rules.group_of(one.labels), index)
        for against, is_same in ((first, True), (0, False)):
            for problem in _problems(names[against], names[index], ready[against], one, is_same=is_same):
                raise ConfigError(problem)


def _problems(first_name: str, name: str, first: EngineReady, found: EngineReady, *, is_same: bool) -> Iterator[str]:
    differing = sorted(_differing(first.files, found.files))
    if not is_same:
        differing = [one for one in differing if not one.endswith(WEIGHTS)]
    if differing:
        advice = (SPLIT if all(one.endswith(WEIGHTS) for one in differing) else ADVICE).format("model")
        what = "another model" if is_same else "other text files"
        yield f"engine {name} has {what} than engine {first_name}: {', '.join(differing)} differ; {advice}"
    if first.served_names and found.served_names and tuple(first.served_names) != tuple(found.served_names):
        names = f"engine {name} serves {', '.join(found.served_names)}, and engine {first_name} "
        advice = "name the model of each, as in --engine MODEL=ADDRESS, or give both the same --served-model-name"
        yield f"{names}{', '.join(first.served_names)}; {advice}"
    assert first.config is not None and found.config is not None
    pairs = [(one, getattr(first.config, one), getattr(found.config, one)) for one in SETTINGS]
    pairs += [(one, getattr(first.info, one), getattr(found.info, one)) for one in (SAME if is_same else FACTS)]
    for setting, due, own in pairs:
        if due != own:
            noun = "setting" if setting in SETTINGS else setting
            message = f"engine {name} has {setting} = {own}, and engine {first_name} {due}"
            yield f"{message}; {(ADVICE if setting in (*SETTINGS, *FACTS) else SPLIT).format(noun)}"


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> set[str]:
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}
