"""What launches may do on a new kind of device: on, unless the environment says otherwise.

The benchmark tries both first on a device, and takes back what does not hold there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class LaunchSwitches:
    """Read at each launch, and at each capture of a graph."""

    early: bool = True  # launches may begin before those ahead have ended, see `launch.py`
    branches: bool = True  # a captured graph may have branches, see `branch.py`

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchSwitches:
        """MILLRACE_EARLY_LAUNCH and MILLRACE_GRAPH_BRANCHES: 0 is off."""
        return cls(environment.get("MILLRACE_EARLY_LAUNCH") != "0", environment.get("MILLRACE_GRAPH_BRANCHES") != "0")


SWITCHES = LaunchSwitches.of(os.environ)
