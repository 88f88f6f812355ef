"""A product of matrices in Triton, as in the attention kernels of vLLM, which is compiled for a GPU without having one.

It cannot be imported without Triton.
"""

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

_SIZE = 16


@triton.jit  # type: ignore[untyped-decorator]
def _product(first, second, result, size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(result + places, tl.dot(tl.load(first + places), tl.load(second + places)))


def instructions() -> str:
    """Instructions of an H100 for the product of two float32 matrices."""
    pointers = dict.fromkeys(("first", "second", "result"), "*fp32")
    source: Any = triton.compiler.ASTSource(
        fn=_product, signature={**pointers, "size": "constexpr"}, constexprs={"size": _SIZE}
    )
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
