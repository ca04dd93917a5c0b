"""The encoder runner: pads a batch of prompts, runs the encoder, and pools. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..messages import Begun, Pooled, TokenRequest
from ..pooling_params import Floats, Kind

if TYPE_CHECKING:
    from ...model.encoder.bidirectional import Bidirectional


class EncoderRunner:
    """The `Encoder` that runs a checkpoint. Called on the device thread."""

    def __init__(self, model: Bidirectional, device: torch.device) -> None:
        self.model = model
        self.device = device

    def encode(self, batch: Sequence[TokenRequest]) -> list[Pooled]:
        """The vector of each prompt, in order."""
        if self.model.allows_padding:
            return self._encode(batch)
        by_length: dict[int, list[int]] = {}
        for place, request in enumerate(batch):
            by_length.setdefault(len(request.token_ids), []).append(place)
        made: dict[int, Pooled] = {}
        for places in by_length.values():
            made |= zip(places, self._encode([batch[place] for place in places]), strict=True)
        return [made[place] for place in range(len(batch))]

    def _encode(self, batch: Sequence[TokenRequest]) -> list[Pooled]:
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
        """Pools hidden states [N, P, H] to embeddings [N, E]."""
        hidden = hidden.float()
        params = [request.pooling for request in batch]
        skipped = self._upload(np.array([each.num_skipped if each else 0 for each in params]))
        places = torch.arange(hidden.shape[1], device=self.device)[None]  # [1, P]
        is_pooled = (mask > 0) & (places >= skipped[:, None])  # [N, P]
        kinds: list[Kind] = [each.kind if each and each.kind else "cls" for each in params]
        if len(set(kinds)) == 1:  # the usual case; rows chosen by a mask would copy all hidden states
            pooled = POOLINGS[kinds[0]](hidden, is_pooled)
        else:
            pooled = torch.empty_like(hidden[:, 0])
            for kind in dict.fromkeys(kinds):
                rows = self._upload(np.array([each == kind for each in kinds]))
                pooled[rows] = POOLINGS[kind](hidden[rows], is_pooled[rows])
        for layer in self.model.dense:
            pooled = layer(pooled)
        vectors: Floats = pooled.cpu().numpy()
        return vectors

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _weighted(hidden: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    return (hidden * weights[:, :, None]).sum(1) / total.clamp(min=1e-9)[:, None]


def _mean(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    return _weighted(hidden, is_pooled.float(), is_pooled.sum(1).float())


def _mean_sqrt_len(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    return _weighted(hidden, is_pooled.float(), is_pooled.sum(1).float().sqrt())


def _weighted_mean(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    """A mean in which the n-th token of the text counts n times."""
    weights = is_pooled * torch.arange(1.0, hidden.shape[1] + 1, device=hidden.device)[None]
    return _weighted(hidden, weights, weights.sum(1))


def _max(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    return hidden.masked_fill(~is_pooled[:, :, None], -torch.inf).amax(1)


def _first(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), is_pooled.int().argmax(1)]


def _last(hidden: Tensor, is_pooled: Tensor) -> Tensor:
    places = hidden.shape[1] - 1 - is_pooled.int().flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


# Of hidden states [N, P, H] at the places [N, P] that are true, as [N, H].
POOLINGS: dict[Kind, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "last": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len": _mean_sqrt_len,
    "weighted_mean": _weighted_mean,
}


def _pooled(request: TokenRequest, vector: Floats) -> Pooled:
    assert request.pooling is not None, "a request without pooling is refused before it reaches an encoder"
    return Pooled(request.first_sequence_id, request.pooling.finish(vector), Begun(request.token_ids, 0))
