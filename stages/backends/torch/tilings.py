"""The launch options of the card, and what the decoder makes of them: which products are Triton's, and why not."""

from __future__ import annotations

from typing import Any

import torch

from ....kernels.tilings.predicted import BYTES_PER_S
from ....kernels.tilings.products import SHARED_BYTES
from ....kernels.tilings.shared_memory import block_bytes, least_shared_bytes
from ....kernels.tilings.tables import Tilings, TilingsError, load_tilings
from ....model.decoder.decoder import Decoder
from ....runtime.env.log import get_logger
from ...config import EngineConfig
from ...errors import ConfigError

log = get_logger("millrace.stages")


def tilings_of(config: EngineConfig, device: torch.device, kernels: str) -> Tilings | None:
    """The launch options by the setting `tilings`; None = these kernels have no products of their own.

    Raises `ConfigError` for a file that cannot be used.
    """
    if kernels != "triton":
        return None
    card, capability, sizes = "cpu", 90, (1, SHARED_BYTES, BYTES_PER_S)  # Triton's interpreter
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card, processors = properties.name, properties.multi_processor_count
        capability = 10 * properties.major + properties.minor
        sizes = (processors, least_shared_bytes(properties.major, properties.minor), _bytes_per_s(properties))
    try:
        tilings = load_tilings(config.tilings, card, *sizes)
    except TilingsError as error:
        raise ConfigError(str(error)) from None
    if device.type == "cuda" and (left_out := tilings.too_large(block_bytes(capability))):
        log.warning("tilings.too_large", card=card, capability=capability, left_out=left_out)
    return tilings


def _bytes_per_s(properties: Any) -> float:
    """The data sheet's rate of the memory, which moves twice a cycle; an H200's if the driver does not tell."""
    clock_khz, bus_bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * clock_khz * 1000 * bus_bits / 8 or BYTES_PER_S


def log_products(tilings: Tilings | None, decoder: object) -> None:
    """Logs the form of each kind of product."""
    if tilings is not None and isinstance(decoder, Decoder):
        decisions = decoder.few_rows.decisions
        products = [f"{product}: {decision}" for product, decision in decisions.items()]
        log.info("products.chosen", card=tilings.card, measured=tilings.source, products=products)
