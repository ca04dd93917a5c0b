"""The chart, as helm renders it with the value files of values/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kube.tools import ROOT, run

CHART = ROOT / "deploy" / "chart"
VALUES = Path(__file__).parent / "values"
GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in VALUES.glob("*.yaml"))
TOPOLOGIES = ("pods", "fleet", "multinode")
# topology, or a fleet with groups of engines -> the values of its golden file
SHOWN = {"pods": "keda", "fleet": "keda", "multinode": "gpu", "canary": "keda", "models": "gpu"}
# What turns any value file into one of a group of pods; the arguments are the chart's user's.
MULTINODE = {
    "topology": "multinode",
    "autoscaling": {"kind": "none"},
    "multinode": {"groupSize": 2, "leaderArgs": ["--print-config"], "workerArgs": ["collect-env"]},
}
# What turns any value file into one of fronts and engines.
FLEET = {
    "topology": "fleet",
    "fleet": {"keySecret": "fleet", "tls": {"secret": "fleet-tls"}, "engineSettings": {"max_num_seqs": 64}},
}
# The same with a new version that answers a share of the requests, and one that computes copies.
CANARY = FLEET | {
    "adminKeys": {"secret": "millrace-admin"},
    "fleet": FLEET["fleet"]
    | {
        "labels": {"version": "v1"},
        "split": "version=v2:5",
        "shadow": "version=v3:0.5",
        "groups": {
            "canary": {"engines": 1, "labels": {"version": "v2"}, "image": {"tag": "cpu-v2"}},
            "shadow": {
                "engines": 1,
                "labels": {"version": "v3", "zone": "a"},
                "model": "/models/tuned",
                "engineSettings": {"max_num_seqs": 64, "threads": 2},
                "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
            },
        },
    },
}
# Fronts and engines of two models, one of which has a canary too.
MODELS = FLEET | {
    "autoscaling": {"kind": "none"},
    "fleet": FLEET["fleet"]
    | {
        "modelName": "small",
        "split": "version=v2:10",
        "groups": {
            "large": {"engines": 2, "modelName": "large", "model": "ORG/LARGE", "gpus": 4, "tolerations": []},
            "large-canary": {
                "engines": 1,
                "modelName": "large",
                "model": "ORG/LARGE",
                "labels": {"version": "v2"},
                "engineSettings": {"revision": "v2"},
                "gpus": 4,
            },
        },
    },
}
CHANGED: dict[str, dict[str, Any]] = {
    "pods": {},
    "fleet": FLEET,
    "multinode": MULTINODE,
    "canary": CANARY,
    "models": MODELS,
}


def values(name: str, topology: str = "pods") -> dict[str, Any]:
    """A value file, for a topology."""
    found: dict[str, Any] = yaml.safe_load((VALUES / f"{name}.yaml").read_text())
    return found | CHANGED[topology]


def render(given: dict[str, Any]) -> str:
    """The manifests of these values."""
    text = yaml.safe_dump(given)
    return run("helm", "template", "release", CHART, "--namespace", "llm", "--values", "-", text=text).stdout


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of YAML; ten times as fast where PyYAML has its C library."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [one for one in yaml.load_all(text, loader) if one is not None]


def golden(topology: str) -> str:
    """What the golden file of a topology must hold."""
    head = f"# The chart with values/{SHOWN[topology]}.yaml. Written by `python -m tests.deploy.kube --write`.\n"
    return head + render(values(SHOWN[topology], topology)).lstrip("-\n")


def write_golden() -> None:
    for topology in SHOWN:
        (GOLDEN / f"{topology}.yaml").write_text(golden(topology))
