"""What the Triton kernels lack of `KernelSet`. Does not import Triton."""

from __future__ import annotations


def gaps(*, has_alibi: bool = False, has_chunk: bool = False, is_row_normed_after_rope: bool = False) -> list[str]:
    """Which of these parts of a layer's attention the Triton kernels lack, by the names a message can use."""
    lacking = {
        "ALiBi": has_alibi,
        "attention in chunks": has_chunk,
        "norms over rows of heads after the rotation": is_row_normed_after_rope,
    }
    return [part for part, is_asked in lacking.items() if is_asked]


def check_gaps(*, has_alibi: bool = False, has_chunk: bool = False, is_row_normed_after_rope: bool = False) -> None:
    """Raises NotImplementedError that names the parts the kernels lack."""
    found = gaps(has_alibi=has_alibi, has_chunk=has_chunk, is_row_normed_after_rope=is_row_normed_after_rope)
    if found:
        raise NotImplementedError(f"attention_backend = triton: no {', '.join(found)}; use attention_backend = torch")
