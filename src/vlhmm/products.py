"""Matrix products by oneDNN where MKL is slow: AMD processors with AVX-512. Only this module changes torch's choice.

MKL, which torch calls for float32 products on a CPU, keeps to AVX2 there; oneDNN uses AVX-512 and is two to four times as
fast. torch hands float32 products to oneDNN only if it may round them to bfloat16. Without AMX oneDNN makes no use of
that permission: results stay those of float32, which is checked on products of several shapes before it is given.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

mkldnn: Any = torch.backends.mkldnn  # torch's annotations do not know its `matmul`

# rows, inner dimension and columns: of networks, of transition tiles, of row tiles of the softmax
SHAPES = ((512, 256, 256), (64, 64, 64), (256, 64, 1024))
LARGEST_ERROR = 1e-5  # relative to the largest entry; float32 has 1e-6, bfloat16 4e-3


@contextmanager
def fast_products() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices within this context, where that is faster and as exact as MKL."""
    if not onednn_is_better():
        yield
        return
    settings = mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def use_fast_products() -> None:
    """Let oneDNN multiply float32 matrices until this process ends, where that is faster and as exact as MKL."""
    if onednn_is_better():
        mkldnn.matmul.fp32_precision = "bf16"


@functools.cache
def onednn_is_better() -> bool:
    """Return whether oneDNN's float32 products are faster than MKL's on this processor, and as exact.

    Depends on the processor and on torch alone, not on a measurement: a resumed run must choose the same.
    """
    if not hasattr(mkldnn, "matmul") or not mkldnn.is_available():
        return False  # torch before 2.9 has no such setting
    return "AuthenticAMD" in _processor() and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _processor() -> str:
    """Return Linux's description of the processor; empty on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return ""


def _is_exact() -> bool:
    """Return whether products that may be rounded to bfloat16 are still those of float32."""
    settings, generator = mkldnn.matmul, torch.Generator().manual_seed(0)
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        return all(_error(*shape, generator) < LARGEST_ERROR for shape in SHAPES)
    finally:
        settings.fp32_precision = before


def _error(rows: int, inner: int, columns: int, generator: torch.Generator) -> float:
    """Return the largest error of a product, alone and in a batch with its transpose, relative to its largest entry."""
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator)
    exact = left.double() @ right.double().t()
    alone, batched = left @ right.t(), torch.bmm(right[None], left.t()[None])[0].t()
    return max(float((product - exact).abs().max() / exact.abs().max()) for product in (alone, batched))
