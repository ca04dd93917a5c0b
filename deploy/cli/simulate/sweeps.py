"""`millrace simulate`: runs a trace through the real scheduler with other settings, without the device.

With `--fleet`, through several behind a router: `fleet.py`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from ....kernels.layout.kv_layout import KVLayout
from ....stages.config import EngineConfig
from ....stages.errors import ConfigError
from ....stages.recordings.cost_model import FittedCostModel, fit
from ....stages.recordings.reader import Recording, RecordingError
from ....stages.recordings.recorded_engine import RecordedEngine
from ....stages.recordings.simulated_engine import AdmissionLimits
from ....stages.recordings.simulation import Simulation
from ....stages.recordings.workloads import Workload, read_trace
from ....stages.schedule.policy import Policy, make_policy
from ...config import ServerConfig
from ...output_file import check_output_file, write_output_file
from ...settings.near_miss import near_miss
from ...settings.sources import parse
from .fleet import FIXED, check_fleet, policies, run_fleet, scalings

UNREADABLE = 3
FIT = "fit-from-recording"
# name of an engine setting -> its name in a recording, if different
RENAMED = {"num_gpu_blocks": "num_blocks", "num_cpu_blocks": "num_host_blocks"}
ADMISSION_FIELDS = tuple(spec.name for spec in fields(AdmissionLimits))
DRAFT_FIELDS = ("speculation", "num_speculative_tokens")
ENGINE_FIELDS = tuple(
    name for name in EngineConfig.__dataclass_fields__ if RENAMED.get(name, name) in RecordedEngine.__dataclass_fields__
)
COLUMNS = {  # figure -> heading and digits
    "output_tokens_per_s": ("tokens/s", 1),
    "requests_per_s": ("req/s", 3),
    "ttft_p50_ms": ("TTFT p50", 1),
    "ttft_p99_ms": ("p99 ms", 1),
    "itl_p50_ms": ("ITL p50", 2),
    "itl_p99_ms": ("p99 ms", 2),
    "preemptions": ("preempted", 0),
    "turned_away": ("refused", 0),
    "cache_hit_rate": ("cached", 3),
    "device_busy": ("busy", 3),
}
FLEET_COLUMNS = {
    "cached_tokens": ("cached", 0),
    "imbalance": ("max/mean", 2),
    "engines": ("engines", 0),  # at most, at the same time
    "engine_hours": ("hours", 2),
    "resumed": ("resumed", 0),
}
PANELS = {  # title -> its curves
    "throughput, tokens/s": {"output": "output_tokens_per_s"},
    "time to first token, ms": {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"},
    "between tokens, ms": {"p50": "itl_p50_ms", "p99": "itl_p99_ms"},
    "preemptions": {"preemptions": "preemptions"},
}


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One run: its varied settings, and its results."""

    settings: Mapping[str, Any]
    figures: Mapping[str, float | int | None]

    @property
    def label(self) -> str:
        """The settings, for a table or an axis."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "as it was"


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 3 for a file that cannot be read."""
    _check(options)
    try:
        rows = simulate(options)
    except RecordingError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return UNREADABLE
    print(table(rows))
    if options.save_result is not None:
        results = [{"settings": dict(row.settings), **row.figures} for row in rows]
        content = orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_output_file("--save-result", options.save_result, content)
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for numbers and files with which a simulation would end wrongly."""
    if options.max_requests is not None and options.max_requests < 1:
        raise ConfigError(f"--max-requests {options.max_requests}: must be at least 1")
    for name in ("scale_times", "scale_lengths"):
        if not 0.0 <= (value := getattr(options, name)) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be a number, 0 or more")
    for name in ("save_cost_model", "save_result", "plot"):
        check_output_file(f"--{name.replace('_', '-')}", getattr(options, name))


def simulate(options: argparse.Namespace) -> list[SimulationRow]:
    """Runs each combination of the swept settings; of a fleet, with each rule. Raises as `_apply` and `fit` do."""
    if options.fleet is not None:
        check_fleet(options)
    fitted = _fitted(options)
    print(_describe(fitted), file=sys.stderr)
    if options.save_cost_model is not None:
        write_output_file("--save-cost-model", options.save_cost_model, fitted.to_json())
    trace = read_trace(options.trace)
    trace = trace.scaled(times=options.scale_times, lengths=options.scale_lengths, most=options.max_requests)
    fixed = dict(_assignment(text) for text in options.set or ())
    if not trace.has_prefixes and "enable_prefix_caching" not in fixed:
        print("the trace has no common prefixes of prompts: enable_prefix_caching = False", file=sys.stderr)
        fixed["enable_prefix_caching"] = False
    swept = dict(_sweep(text) for text in options.sweep or ())
    combinations = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    if not trace.has_repeats and any(_most_drafts(fitted.engine, {**fixed, **varied}) for varied in combinations):
        print("the trace has no repetitions in answers: speculation = off", file=sys.stderr)
    if options.fleet is None:
        return [SimulationRow(varied, run_one(trace, fitted, {**fixed, **varied})) for varied in combinations]
    rows = []
    for varied in combinations:
        engine, limits, policy = _apply(fitted.engine, {**fixed, **varied})
        if policy is not None:
            raise ConfigError("--fleet: its engines keep the scheduler of the recording; leave out scheduler = ...")
        rules = itertools.product(policies(options.policy), scalings(options.autoscale))
        for name, autoscale in rules:
            figures = run_fleet(options, trace, engine, fitted.model, limits, name, autoscale)
            told = {"policy": name} | ({} if options.autoscale == FIXED else {"autoscale": autoscale})
            rows.append(SimulationRow({**varied, **told}, figures))
    return rows


def run_one(trace: Workload, fitted: FittedCostModel, settings: Mapping[str, Any]) -> dict[str, float | int | None]:
    """The results of a trace with `settings`; other settings are those of the cost model's recording."""
    engine, limits, policy = _apply(fitted.engine, settings)
    was_enabled = gc.isenabled()
    gc.disable()  # a simulation makes millions of objects without cycles, which collections would scan in vain
    try:
        return Simulation(engine, fitted.model, limits, policy).run(trace).summary()
    finally:
        if was_enabled:
            gc.enable()


def table(rows: Sequence[SimulationRow]) -> str:
    """The runs as a table, one line each."""
    columns = COLUMNS | (FLEET_COLUMNS if "engines" in rows[0].figures else {})
    lines = [["settings", *(heading for heading, _ in columns.values())]]
    for row in rows:
        cells = [row.label]
        for name, (_, digits) in columns.items():
            figure = row.figures[name]
            cells.append("-" if figure is None else f"{figure:.{digits}f}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths) for line in lines)


def plot(rows: Sequence[SimulationRow], path: Path) -> None:
    """Writes four panels with the runs from left to right, by matplotlib, an optional extra.

    The suffix of `path` chooses the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install -e '.[plots]'") from None
    figure = Figure(figsize=(max(7.0, 1.2 * len(rows) + 3), 7.0), layout="constrained")
    labels = [row.label for row in rows]
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, field in curves.items():
            values = [float("nan") if row.figures[field] is None else row.figures[field] for row in rows]
            axes.plot(range(len(rows)), values, "o-", label=name)
        axes.set_title(title)
        axes.set_xticks(range(len(rows)), labels, rotation=30, ha="right")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _fitted(options: argparse.Namespace) -> FittedCostModel:
    if options.cost_model != FIT:
        return FittedCostModel.read(Path(options.cost_model))
    return fit(Recording(options.trace))


def _describe(fitted: FittedCostModel) -> str:
    model = fitted.model
    each = f"{model.prefill_token_s * 1e6:.3g} us per prompt token, {model.decode_row_s * 1e6:.3g} us per decoding row"
    text = f"cost model: a step takes {model.step_s * 1e3:.3g} ms and {each}"
    if fitted.num_steps:
        text += f"; fitted to {fitted.num_steps} steps, off by {fitted.mean_error:.1%} on average"
    return text


# -- settings


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return _known(name, text), parse(EngineConfig, name, value)


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    return _known(name, text), [parse(EngineConfig, name, value) for value in values.split(",")]


def _known(name: str, text: str) -> str:
    if name not in (*ENGINE_FIELDS, *DRAFT_FIELDS, *ADMISSION_FIELDS) or "=" not in text:
        known = (*ENGINE_FIELDS, *DRAFT_FIELDS, *ADMISSION_FIELDS)
        raise ConfigError(f"{text}{near_miss(name, known)}: must be name=value, with one of {', '.join(known)}")
    return name


def _apply(
    engine: RecordedEngine, settings: Mapping[str, Any]
) -> tuple[RecordedEngine, AdmissionLimits, Policy | None]:
    """Applies the settings, checked as those of an engine."""
    of_engine = {RENAMED.get(name, name): value for name, value in settings.items() if name in ENGINE_FIELDS}
    recorded, engine = engine, replace(engine, **of_engine, most_drafts=_most_drafts(engine, settings))
    values = {name: getattr(engine, RENAMED.get(name, name)) for name in ENGINE_FIELDS}
    values |= {name: settings[name] for name in DRAFT_FIELDS if name in settings}
    if "max_loras" not in settings and not engine.max_loras:  # the engine served no adapters
        del values["max_loras"]
    if "scheduler" not in settings:
        values["scheduler"] = "priority"
    config = EngineConfig(**values)
    for name in ("max_model_len", "num_gpu_blocks", "num_cpu_blocks", "max_num_batched_tokens", "itl_target_ms"):
        if not isinstance(values[name], (int, float)):
            raise ConfigError(f"{name} = {values[name]}: must be a number, as a simulation has no device to measure")
    has_windows = engine.kv_layout is not None and engine.kv_layout.has_windows
    if not (engine.has_kinds or has_windows) and engine.num_blocks * engine.block_size < engine.max_model_len:
        raise ConfigError(
            f"num_gpu_blocks = {engine.num_blocks} of {engine.block_size} tokens hold no sequence of max_model_len = "
            f"{engine.max_model_len}: give it at least {-(-engine.max_model_len // engine.block_size)}"
        )
    if engine.kv_layout is not None and (engine.has_kinds or has_windows):
        engine = _with_kinds(engine, engine.kv_layout, recorded, settings)
    policy = make_policy(config) if "scheduler" in settings or "priority_ageing_s" in settings else None
    return engine, AdmissionLimits(**{name: settings[name] for name in ADMISSION_FIELDS if name in settings}), policy


def _with_kinds(
    engine: RecordedEngine, layout: KVLayout, recorded: RecordedEngine, settings: Mapping[str, Any]
) -> RecordedEngine:
    """`engine` with the memory of several kinds that its settings make, in which sizes are in blocks of all layers."""
    kinds = [
        replace(kind, block_bytes=kind.block_bytes * engine.block_size // layout.block_size) for kind in layout.kinds
    ]
    bytes_per_block, num_bytes = sum(kind.block_bytes for kind in kinds), layout.total_bytes
    if "num_gpu_blocks" in settings:
        num_bytes = engine.num_blocks * bytes_per_block
    if "num_gpu_blocks" in settings or engine.block_size != layout.block_size:
        layout = KVLayout.of(kinds, engine.block_size, num_bytes, layout.place)
    if not layout.num_at_once(engine.max_model_len):
        needed = layout.slabs_of_one(engine.max_model_len)
        raise ConfigError(
            f"num_gpu_blocks = {num_bytes // bytes_per_block} of {engine.block_size} tokens hold no sequence of "
            f"max_model_len = {engine.max_model_len}: give it at least "
            f"{-(-needed * layout.slab_bytes // bytes_per_block)}"
        )
    host = (recorded.num_host_blocks, *recorded.num_more_host_blocks)
    if "num_cpu_blocks" in settings:
        host = layout.host_blocks(engine.num_host_blocks * bytes_per_block, engine.max_model_len)
        host = host if all(host) else (0,) * len(host)
    num_host_blocks, *more = host
    return replace(
        engine,
        kv_layout=layout,
        num_blocks=layout.num_blocks[0],
        num_host_blocks=num_host_blocks,
        num_more_host_blocks=tuple(more),
    )


def _most_drafts(engine: RecordedEngine, settings: Mapping[str, Any]) -> int:
    """Drafts per step with these settings; "auto" is as in the cost model's recording."""
    speculation = settings.get("speculation", "auto")
    default_num_tokens = engine.most_drafts or EngineConfig().num_speculative_tokens
    is_on = speculation == "ngram" or (speculation == "auto" and engine.most_drafts > 0)
    num_tokens: int = settings.get("num_speculative_tokens", default_num_tokens)
    return num_tokens if is_on else 0
