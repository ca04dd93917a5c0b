"""The Muon optimizer (Jordan et al., 2024) for weight matrices, in float32 on a CPU."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal: each direction of a matrix moves by the same amount.

    Only for matrices inside the layers; embeddings and norms belong to AdamW. The matrices are shared among the threads
    of `pool`.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, pool: Executor, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum})
        self.pool = pool

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            list(self.pool.map(lambda matrix, group=group: self._update(matrix, group), group["params"]))

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        with torch.no_grad():  # a thread of its own has a gradient mode of its own
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            assert matrix.grad is not None
            state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
            update = orthogonal(matrix.grad.lerp(state["momentum"], group["momentum"]))
            rows, columns = matrix.shape
            matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """About U @ V.T of the singular value decomposition, by Newton-Schulz iterations: singular values in [0.7, 1.2]."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steepest at zero, so that small singular values grow fast
    x: Tensor = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c).matmul(x)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
