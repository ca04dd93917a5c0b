"""`millrace bench lora`: what adapters add to the time of a decoding step, with the engine in this process.

The floor of a mix is the time to read its adapters once, as fast as a step of one row reads the base's weights. Nothing
that reads each adapter in each step takes less, unless adapters stay in a cache or sums take longer than memory.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ....stages.config import MAX_LORAS, EngineConfig
from ....stages.errors import ConfigError
from ....stages.loading.early import resolve
from ...config import ServerConfig
from .load import Rng, random_requests
from .offline import make_engine, make_rng, run_request
from .random_adapter import write_adapters
from .report import at_least_one, check_result, print_errors, progress, save

if TYPE_CHECKING:
    from ....stages.engine.engine import Engine

MIXES = ("1/1", "8/8", "32/1", "32/8", "32/32")
MOST_OF_FLOOR, MOST_OF_STEP = 1.3, 0.02  # what adapters may add: so many floors, and this share of a step without


@dataclass(frozen=True, slots=True)
class MixCost:
    """Median times of a step of `num_rows` rows, in turns without adapters and with them."""

    num_rows: int
    num_adapters: int
    base_ms: float
    step_ms: float
    floor_ms: float

    @property
    def most_ms(self) -> float:
        """What adapters should add at most."""
        return MOST_OF_FLOOR * self.floor_ms + MOST_OF_STEP * self.base_ms

    def line(self) -> str:
        added = self.step_ms - self.base_ms
        shares = f"{100 * added / self.base_ms:>6.1f} {100 * self.floor_ms / self.base_ms:>6.1f}"
        times = f"{self.base_ms:>9.2f} {self.step_ms:>9.2f} {added:>9.2f} {self.floor_ms:>9.2f} {self.most_ms:>9.2f}"
        return f"{self.num_rows:>5} {self.num_adapters:>9} {times} {shares}"


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a request failed."""
    at_least_one(options, "input_len", "output_len", "num_iters", "rank")
    check_result(options)
    mixes = parse_mixes(options.mix or MIXES)
    with TemporaryDirectory(prefix="millrace-lora-") as folder:
        return asyncio.run(_run(options, engine_config, mixes, Path(folder)))


def parse_mixes(texts: Sequence[str]) -> list[tuple[int, int]]:
    """(rows, adapters) of each ROWS/ADAPTERS. Raises `ConfigError`."""
    found = []
    for text in texts:
        rows, _, adapters = text.partition("/")
        if not (rows.isdecimal() and adapters.isdecimal()) or not 1 <= int(adapters) <= min(int(rows), MAX_LORAS):
            raise ConfigError(f"--mix {text}: must be ROWS/ADAPTERS with at least one row for each adapter, as 32/8")
        found.append((int(rows), int(adapters)))
    return found


async def _run(options: argparse.Namespace, config: EngineConfig, mixes: list[tuple[int, int]], folder: Path) -> int:
    from ....model.families.registry import read_spec

    rng, most = make_rng(config.seed), max(adapters for _, adapters in mixes)
    names, num_weights = write_adapters(folder, read_spec(resolve(config)), most, options.rank, rng)
    config = _with_adapters(config, options, max(rows for rows, _ in mixes), most, folder)
    errors: list[str] = []
    async with make_engine(config) as engine:
        bytes_per_adapter = num_weights * (4 if engine.info.dtype == "float32" else 2)
        (alone_ms,) = await _measure(engine, options, 1, [[None]], rng, errors)
        assert engine.info.weights is not None
        bytes_per_ms = engine.info.weights.bytes_per_token / alone_ms
        costs = []
        for num_rows, num_adapters in mixes:
            chosen = [names[row % num_adapters] for row in range(num_rows)]
            models: list[list[str | None]] = [[None] * num_rows, list(chosen)]
            base_ms, step_ms = await _measure(engine, options, num_rows, models, rng, errors)
            floor_ms = num_adapters * bytes_per_adapter / bytes_per_ms
            costs.append(MixCost(num_rows, num_adapters, base_ms, step_ms, floor_ms))
        about = {"model_id": engine.info.model_id, "backend": engine.info.attention_backend, "rank": options.rank}
    _publish(options, about | {"bytes_per_adapter": bytes_per_adapter, "gb_per_s": bytes_per_ms / 1e6}, costs)
    print_errors(errors)
    return 1 if errors else 0


def _with_adapters(
    config: EngineConfig, options: argparse.Namespace, num_rows: int, num_adapters: int, folder: Path
) -> EngineConfig:
    """The settings, with all adapters in slots and all rows in a step, without drafts and cached prompts."""
    return replace(
        config,
        enable_lora=True,
        max_loras=num_adapters,
        max_cpu_loras=num_adapters + 1,
        max_lora_rank=max(options.rank, config.max_lora_rank),
        lora_dir=str(folder),
        max_num_seqs=max(num_rows, config.max_num_seqs),
        speculation="off",
        enable_prefix_caching=False,
    )


async def _measure(
    engine: Engine,
    options: argparse.Namespace,
    num_rows: int,
    models: list[list[str | None]],
    rng: Rng,
    errors: list[str],
) -> list[float]:
    """Median ms between tokens of batches of rows with these models (None: the base), which take turns."""
    gaps: list[list[float]] = [[] for _ in models]
    with progress(options.num_iters, f"turn of {num_rows} rows") as bar:
        for turn in range(-1, options.num_iters):  # the first loads the adapters
            for found, adapters in zip(gaps, models, strict=True):
                lengths = (options.input_len, options.output_len)
                requests = random_requests(num_rows, *lengths, engine.info.vocab_size, rng)
                runs = (run_request(engine, *each) for each in zip(requests, adapters, strict=True))
                records = await asyncio.gather(*runs)
                errors += [record.error for record in records if record.error is not None]
                if turn >= 0:
                    # the first gaps are those of steps that still read prompts
                    found += [gap for record in records for gap in record.itls_s[len(record.itls_s) // 4 :]]
            if turn >= 0:
                bar.update()
    return [1e3 * float(np.median(found)) if found else float("nan") for found in gaps]


def _publish(options: argparse.Namespace, settings: dict[str, object], costs: list[MixCost]) -> None:
    print(f"{settings['model_id']} ({settings['backend']}), rank {settings['rank']} on all linears")
    print(f"{settings['bytes_per_adapter']} bytes an adapter; one row reads {settings['gb_per_s']:.1f} GB/s")
    print(" rows  adapters   base ms   step ms     added     floor      most      %  floor %")
    for cost in costs:
        print(cost.line())
    save(options, settings, {"mixes": [asdict(cost) | {"most_ms": cost.most_ms} for cost in costs]})
