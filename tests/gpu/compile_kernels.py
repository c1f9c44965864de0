"""Compiles the Triton kernels to machine code of several GPUs, for which no GPU is needed; prints what was compiled.

python -m gpu.compile_kernels 80 90 100
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megasdc.tensors import bound_kernel, mixed_sum_kernel

WIDTHS = {"u8": 2048, "u16": 2048, "u32": 1024, "u64": 512}
"""Block of each width of an element, as the checksum's kernel is called."""


def compile_for(capability: int) -> int:
    """Compile every variant that a run may call; bytes of machine code."""
    target, size = GPUTarget("cuda", capability, 32), 0
    for kind, block in WIDTHS.items():
        signature = {"bits": f"*{kind}", "total": "*i64", "num_elements": "i64", "BLOCK": "constexpr"}
        source = ASTSource(mixed_sum_kernel._mixed_sum_kernel, signature, {"BLOCK": block})
        size += len(triton.compile(source, target=target).asm["cubin"])
    numbers = dict.fromkeys(("absolute", "spike", "root_factor", "root_floor"), "fp32")
    chosen = dict.fromkeys(("HAS_V", "NON_FINITE", "TYPE", "BLOCK"), "constexpr")
    for dtype, kind in {torch.float32: "i32", torch.bfloat16: "i16", torch.float16: "i16"}.items():
        for moment, rule in (("*fp32", "keep"), ("*fp32", "bound"), ("*fp64", "zero")):
            pointers = {"gradient": f"*{kind}", "second_moment": moment, "partial": "*fp64"}
            constants = {
                "HAS_V": moment == "*fp32",
                "NON_FINITE": rule,
                "TYPE": bound_kernel._TYPES[dtype],
                "BLOCK": bound_kernel._BLOCK,
            }
            signature = {**pointers, "num_elements": "i32", **numbers, **chosen}
            source = ASTSource(bound_kernel._bound_kernel, signature, constants)
            size += len(triton.compile(source, target=target).asm["cubin"])
    signature = {"partial": "*fp64", "sums": "*fp64", "programs": "i32", "scale": "fp32", "rest_of_scale": "fp32"}
    source = ASTSource(bound_kernel._add_up, {**signature, "MOST": "constexpr"}, {"MOST": bound_kernel._MOST_PROGRAMS})
    return size + len(triton.compile(source, target=target).asm["cubin"])


if __name__ == "__main__":
    print(json.dumps({f"sm_{one}": compile_for(int(one)) for one in sys.argv[1:]}))
