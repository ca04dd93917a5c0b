"""The probe of a GPU, on a fake of `torch.cuda`: which errors mean that the GPU computes no more."""

from __future__ import annotations

import pytest
import torch

from millrace.stages.backends.cuda.cuda_probe import CudaProbe
from millrace.stages.backends.cuda.cuda_streams import CudaStreams
from tests.stages.backends.cuda.fake_cuda import FakeCuda

STICKY = RuntimeError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.mark.parametrize(
    ("errors", "is_lost"),
    [
        ([], False),
        ([STICKY], False),  # of an earlier call; the second try passes
        ([STICKY, STICKY], True),
        ([FULL, FULL], False),  # it answers
    ],
)
def test_only_an_error_that_comes_again_means_a_lost_gpu(
    cuda: FakeCuda, errors: list[BaseException], is_lost: bool
) -> None:
    probe, cuda.errors = CudaProbe(torch.device("cuda", 1)), list(errors)
    if is_lost:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            probe()
    else:
        probe()


def test_the_streams_of_a_gpu_and_their_probe_use_that_gpu_alone(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda", 1))
    compute, results = streams.stream("compute"), streams.stream("results")
    streams.probe()
    assert cuda.recorded == [compute.cuda_stream, results.cuda_stream, compute.cuda_stream], "work on any may hang"
    assert {index for _, index in cuda.calls} == {1}
