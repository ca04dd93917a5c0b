"""What a fleet asks of a Ray cluster: one bundle an engine, and where the bundles may go. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError

Resources = Mapping[str, float]  # name -> amount, as Ray has them: "CPU", "GPU", and names of the user's own

PASSED = ("HF_", "NCCL_", "GLOO_")  # beginnings of the names of variables that actors get from this process
AMOUNTS = 10_000  # of a resource that Ray tells apart, within 1


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is asked of a cluster: `num_engines` bundles like `bundle`.

    A bundle is on one node, so all ranks of a tensor-parallel group are.
    """

    bundle: Resources
    num_engines: int
    strategy: str  # Ray's: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD
    config: EngineConfig  # of each engine process

    def __str__(self) -> str:
        return f"{self.num_engines} x {{{_shown(self.bundle)}}}, {self.strategy}"


def make_request(config: EngineConfig, nodes: Sequence[Resources]) -> PlacementRequest:
    """The request for a cluster whose nodes have these resources in all; one that grows may have more later.

    Each engine gets a GPU for each of its ranks, where there are enough for all engines or `device` is cuda; otherwise
    as many CPUs as it has threads: as many as allow all engines to run, if `threads` does not say.
    """
    check_for_ray(config)
    count, size, strategy = config.data_parallel_size, config.tensor_parallel_size, config.ray_placement.upper()
    extra = parse_resources(config.ray_resources)
    on_gpus = {"CPU": float(config.threads or 1), "GPU": float(size)} | extra
    if config.device == "cuda" or (config.device == "auto" and num_fitting(on_gpus, nodes, strategy) >= count):
        return PlacementRequest(on_gpus, count, strategy, _config_there(config, "cuda", config.threads))
    threads = config.threads or _most_threads(extra, nodes, count, strategy)
    bundle = {"CPU": float(threads)} | extra
    return PlacementRequest(bundle, count, strategy, _config_there(config, "cpu", threads))


def check_for_ray(config: EngineConfig) -> None:
    """Raises `ConfigError` for settings that do not go with engines elsewhere."""
    if ":" in config.device:
        raise ConfigError(f"device = {config.device}: Ray chooses the GPUs; set cuda, cpu or auto with executor = ray")
    if config.record is not None:
        raise ConfigError(f"record = {config.record}: would be written on another machine; set executor = process")
    if config.ray_address is not None and config.ray_address.startswith("ray://"):
        message = f"ray_address = {config.ray_address}: a Ray client is no node, and engines dial back to this process"
        raise ConfigError(f"{message}; start the server on a node of the cluster, with ray_address = auto")


def parse_resources(entries: Sequence[str]) -> dict[str, float]:
    """Amounts by name, of entries NAME=AMOUNT. Raises `ConfigError`."""
    found = {}
    for entry in entries:
        name, _, amount = entry.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < float("inf"):
            raise ConfigError(f"ray_resources = {entry}: must be NAME=AMOUNT, such as accelerator_type:L4=0.001")
    return found


def environment_for(entries: Sequence[str], here: Mapping[str, str]) -> dict[str, str]:
    """The variables for actors: those `here` with known beginnings, and NAME or NAME=VALUE of the settings.

    Raises `ConfigError` for a NAME that is not set here.
    """
    found = {name: value for name, value in here.items() if name.startswith(PASSED)}
    for entry in entries:
        name, has_value, value = entry.partition("=")
        if not name or (not has_value and name not in here):
            raise ConfigError(f"ray_env = {entry}: must be NAME=VALUE, or the name of a variable of this process")
        found[name] = value if has_value else here[name]
    return found


def num_fitting(bundle: Resources, nodes: Sequence[Resources], strategy: str) -> int:
    """How many such bundles a cluster has room for, if nothing else runs on it."""
    each = [_num_on(node, bundle) for node in nodes]
    match strategy:
        case "STRICT_PACK":
            return max(each, default=0)
        case "STRICT_SPREAD":
            return sum(room > 0 for room in each)
    return sum(each)


def no_room(request: PlacementRequest, nodes: Sequence[Resources], what: str) -> str:
    """Why engines were not placed: what was asked for, and what there is."""
    there = "; ".join(f"{{{_shown(node)}}}" for node in nodes) or "no node"
    return (
        f"executor = ray: the cluster {what}: {request}; its {len(nodes)} node(s) have in all {there}; lower "
        "data_parallel_size, threads or ray_resources, choose another ray_placement, or add nodes"
    )


def engines_beside(placed: Sequence[str], index: int, starting: Sequence[int]) -> int:
    """How many of the engines that are `starting`, this one included, share its node. `placed` has the node of each."""
    return len({index, *(one for one in starting if placed[one] == placed[index])})


def _most_threads(extra: dict[str, float], nodes: Sequence[Resources], count: int, strategy: str) -> int:
    most = int(max((node.get("CPU", 0.0) for node in nodes), default=0.0))
    fits = (n for n in range(most, 0, -1) if num_fitting({"CPU": float(n)} | extra, nodes, strategy) >= count)
    return next(fits, 1)


def _config_there(config: EngineConfig, device: str, threads: int | None) -> EngineConfig:
    """The settings of an engine process: its ranks are processes beside it."""
    return replace(config, executor="auto", device=device, threads=threads)


def _num_on(node: Resources, bundle: Resources) -> int:
    shares = (int(node.get(name, 0.0) * AMOUNTS) // round(amount * AMOUNTS) for name, amount in bundle.items())
    return min(shares, default=0)


def _shown(resources: Resources) -> str:
    own = [one for one in resources.items() if not one[0].startswith(("node:", "object_store"))]
    return ", ".join(f"{name}: {_amount(name, amount)}" for name, amount in own)


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB" if name == "memory" else f"{amount:g}"
