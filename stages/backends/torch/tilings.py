"""The launch options of the card, and what the decoder makes of them: which products are Triton's, and why not."""

from __future__ import annotations

import torch

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
    card, num_processors = "cpu", 1  # Triton's interpreter
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card, num_processors = properties.name, properties.multi_processor_count
    try:
        return load_tilings(config.tilings, card, num_processors)
    except TilingsError as error:
        raise ConfigError(str(error)) from None


def log_products(tilings: Tilings | None, decoder: object) -> None:
    """Logs the form of each kind of product."""
    if tilings is not None and isinstance(decoder, Decoder):
        decisions = decoder.few_rows.decisions
        products = [f"{product}: {decision}" for product, decision in decisions.items()]
        log.info("products.chosen", card=tilings.card, measured=tilings.source, products=products)
