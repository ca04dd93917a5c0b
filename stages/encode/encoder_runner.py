"""The encoder runner: pads a batch of prompts, runs the encoder, and pools. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..messages import Begun, Pooled, TokenRequest
from ..pooling_params import Floats

if TYPE_CHECKING:
    from ...model.encoder.bidirectional import Bidirectional


class EncoderRunner:
    """The `Encoder` that runs a checkpoint. Called on the device thread."""

    def __init__(self, model: Bidirectional, device: torch.device) -> None:
        self.model = model
        self.device = device

    def encode(self, batch: Sequence[TokenRequest]) -> list[Pooled]:
        """The vector of each prompt, in order."""
        lengths = np.array([len(request.token_ids) for request in batch])
        inputs = [self._upload(array) for array in self._padded(batch, lengths)]
        if self.model.is_cross_encoder:
            vectors = self.model.scores(*inputs)[:, None].cpu().numpy()  # [N, 1]
        else:
            vectors = self._pool(batch, self.model.hidden_states(*inputs), inputs[1])
        return [_pooled(request, vector) for request, vector in zip(batch, vectors, strict=True)]

    def _padded(self, batch: Sequence[TokenRequest], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Token ids, mask and type ids, [N, P] each."""
        shape = (len(batch), int(lengths.max()))
        ids, types = np.full(shape, self.model.pad_token_id), np.zeros(shape, np.int64)
        for row, request in enumerate(batch):
            ids[row, : lengths[row]] = request.token_ids
            if request.type_ids is not None:
                types[row, : lengths[row]] = request.type_ids
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        return ids, mask, types

    def _pool(self, batch: Sequence[TokenRequest], hidden: Tensor, mask: Tensor) -> Floats:
        """Pools hidden states [N, P, H] to [N, H]."""
        hidden = hidden.float()
        kinds = np.array([request.pooling.kind if request.pooling else None for request in batch])
        pooled = hidden[:, 0]
        if (kinds == "mean").any():
            weights = mask[:, :, None] / mask.sum(1)[:, None, None]  # [N, P, 1]
            pooled = torch.where(self._upload(kinds == "mean")[:, None], (hidden * weights).sum(1), pooled)
        if (kinds == "last").any():
            last = hidden[torch.arange(len(batch), device=self.device), mask.sum(1) - 1]
            pooled = torch.where(self._upload(kinds == "last")[:, None], last, pooled)
        vectors: Floats = pooled.cpu().numpy()
        return vectors

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _pooled(request: TokenRequest, vector: Floats) -> Pooled:
    assert request.pooling is not None, "a request without pooling is refused before it reaches an encoder"
    return Pooled(request.first_sequence_id, request.pooling.finish(vector), Begun(request.token_ids, 0))
