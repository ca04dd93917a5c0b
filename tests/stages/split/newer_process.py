"""An engine process of a later version: of its messages some have other fields. See `test_replacement.py`."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

from millrace.runtime.message import message
from millrace.runtime.processes.wire import Codec
from millrace.stages import messages

NEVER_DEFAULT = itertools.count(1).__next__


def changed(kind: type[Any], left_out: str, **added: Any) -> Any:
    """A message of the same name whose field `left_out` is a constant, and that has others with these defaults.

    A default may be a factory. `NEVER_DEFAULT` makes a field that differs from its default in each message.
    """
    specs = [spec for spec in dataclasses.fields(kind) if spec.name != left_out]
    needed = [spec for spec in specs if spec.default is spec.default_factory is dataclasses.MISSING]
    members: dict[str, Any] = {"__annotations__": {}, "__module__": kind.__module__}
    for spec in needed:
        members["__annotations__"][spec.name] = spec.type
    for name, default in added.items():
        members["__annotations__"][name] = "Any" if callable(default) else type(default).__name__
        members[name] = dataclasses.field(default_factory=default) if callable(default) else default
    if left_out:
        members[left_out] = next(spec.default for spec in dataclasses.fields(kind) if spec.name == left_out)
    for spec in specs:
        if spec not in needed:
            members["__annotations__"][spec.name] = spec.type
            factory = spec.default_factory
            members[spec.name] = (
                spec.default if factory is dataclasses.MISSING else dataclasses.field(default_factory=factory)
            )
    return message(type(kind.__name__, (), members))


@message
class Unheard:
    """A word that the front process does not know."""

    text: str = ""


if __name__ == "__main__":
    messages.StepTokens = changed(messages.StepTokens, "", num_experts=NEVER_DEFAULT, note="")  # type: ignore[misc]
    messages.TokenRequest = changed(messages.TokenRequest, "cache_salt", hurry=0.5)  # type: ignore[misc]
    from millrace.stages.split import protocol

    types = {kind.__name__: kind for kind in protocol.CODEC.types}
    for name in ("EngineReady", "StatusReply", "CoreReport", "ServiceTimes", "ModelLoading"):
        types[name] = changed(types[name], "", startup_us=NEVER_DEFAULT)
        setattr(protocol, name, types[name])
    protocol.CODEC = Codec([Unheard, *reversed(types.values())])
    from millrace.stages.split import engine_process

    sys.exit(engine_process.main(sys.argv[1:]))
