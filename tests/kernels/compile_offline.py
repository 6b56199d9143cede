"""Compile every Triton kernel for one architecture without a GPU; prints `kernel shared_bytes` a line.

Run as a program (`python compile_offline.py 90`), apart from pytest's process, where the interpreter may be on.
"""

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.block_lse import gluon_kernel as block_lse_gluon
from kernels.block_lse.triton_kernel import block_lse_kernel
from kernels.block_scores.triton_kernel import fold_masses_kernel
from kernels.block_selection.triton_kernel import fill_kernel, needed_kernel
from kernels.block_sparse_attention import gluon_kernel as block_sparse_attention_gluon
from kernels.block_sparse_attention.triton_kernel import block_sparse_attention_kernel
from kernels.decode_attention.triton_kernel import merge_kernel, split_kernel
from kernels.kv_quant.triton_kernel import dequantise_kernel, quantise_kernel
from kernels.launch import attention_tile, scoring_tile
from kernels.rms_norm.triton_kernel import rms_norm_kernel
from kernels.rope.triton_kernel import rope_kernel
from kernels.row_quant.triton_kernel import row_quant_kernel
from kernels.sampled_lse.triton_kernel import kept_lse_kernel
from kernels.swiglu.triton_kernel import swiglu_kernel

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]


def cases(arch: int) -> Iterator[Case]:
    """(name, kernel, types of the pointers, constants, options): real shapes, the launcher's own configurations."""
    shared = SHARED_BYTES[arch]
    lists = {"offsets_ptr": "*i64", "blocks_ptr": "*i32"}
    for head_dim in (64, 96, 128, 256):
        width = triton.next_power_of_2(head_dim)
        head = {"HEAD_DIM": head_dim, "BLOCK_D": width}
        for key_block in (64, 128):
            tile = attention_tile(head_dim, 2, 512, key_block, shared)
            yield (
                f"block_sparse_attention-d{head_dim}-k{key_block}",
                block_sparse_attention_kernel,
                {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16"), "lse_ptr": "*fp32", **lists},
                {"LIST_HEADS": 8, "LISTS_PER_KV": 1, "GROUP": 4, "ROW_BLOCK": 128, "KEY_BLOCK": key_block, **head,
                 "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "TILES": 4, "PRECISION": "tf32"},
                {"num_warps": tile.warps, "num_stages": tile.stages},
            )  # fmt: skip
        tile = scoring_tile(head_dim, 2, 512, 128, shared)
        yield (
            f"block_lse-d{head_dim}",
            block_lse_kernel,
            {"q_ptr": "*bf16", "k_ptr": "*bf16", "rows_ptr": "*i32", "out_ptr": "*fp32"},
            {"GROUP": 4, "PER_HEAD": 2, "KEY_BLOCK": 128, **head, "BLOCK_M": tile.rows,
             "BLOCK_N": tile.keys, "CHUNK": 64, "PRECISION": "tf32"},
            {"num_warps": tile.warps, "num_stages": tile.stages},
        )  # fmt: skip
        for stored in ("*bf16", "*i8", "*fp8e4nv") if arch >= 89 else ("*bf16", "*i8"):
            page_bytes = 128 * width * (2 if stored == "*bf16" else 1)
            yield (
                f"decode_split-d{head_dim}-{stored[1:]}",
                split_kernel,
                {"q_ptr": "*bf16", "k_ptr": stored, "v_ptr": stored, "table_ptr": "*i32", "lengths_ptr": "*i32",
                 **dict.fromkeys(("k_scales_ptr", "v_scales_ptr", "acc_ptr", "m_ptr", "total_ptr"), "*fp32")},
                {"KV_HEADS": 8, "GROUP": 4, "ROWS": 16, **head, "PAGE": 128, "QUANTISED": stored != "*bf16",
                 "PRECISION": "tf32"},
                {"num_warps": 4, "num_stages": max(1, min(3, shared // (2 * page_bytes + 16 * 1024)))},
            )  # fmt: skip
    yield (
        "decode_merge",
        merge_kernel,
        {**dict.fromkeys(("acc_ptr", "m_ptr", "total_ptr", "lse_ptr"), "*fp32"), "out_ptr": "*bf16"},
        {"HEADS": 32, "GROUP": 4, "ROWS": 16, "HEAD_DIM": 128, "BLOCK_D": 128, "SPLITS": 128},
        {},
    )
    yield (
        "fold_masses",
        fold_masses_kernel,
        {"lse_ptr": "*fp32", "out_ptr": "*fp32"},
        {"KV_HEADS": 8, "PER_BLOCK": 8, "ROWS": 8, "BLOCK_K": 512},
        {},
    )
    selection = {"KV_HEADS": 8, "SINK": 1, "LOCAL": 2, "BLOCKS": 8192}
    pointers = {"masses_ptr": "*fp32", "causal_ptr": "*i32", "share_ptr": "*i32", "needed_ptr": "*i32"}
    yield "needed", needed_kernel, pointers, selection, {"num_warps": 8}
    pointers |= {"budget_ptr": "*i32", "offsets_ptr": "*i64"}
    for mask in (False, True):
        out = {"out_ptr": "*i8" if mask else "*i32"}
        yield f"fill-mask={mask}", fill_kernel, {**pointers, **out}, {**selection, "MASK": mask}, {"num_warps": 8}
    yield (
        "kept_lse",
        kept_lse_kernel,
        {"lse_ptr": "*fp32", "rows_ptr": "*i32", **lists, "all_ptr": "*fp32", "kept_ptr": "*fp32"},
        {"GROUP": 4, "LIST_HEADS": 8, "HEADS_PER_LIST": 4, "ROW_BLOCK": 128, "CHUNK": 1024},
        {},
    )
    if arch >= 89:
        row_pointers = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        yield "row_quant", row_quant_kernel, row_pointers, {"BLOCK": 4096}, {"num_warps": 8}
    rows = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "sum_ptr": "*bf16", "scale_ptr": "*fp32"}
    for fp8 in (False, True) if arch >= 89 else (False,):
        out = {"out_ptr": "*fp8e4nv" if fp8 else "*bf16"}
        yield (
            f"rms_norm-fp8={fp8}",
            rms_norm_kernel,
            {**rows, **out},
            {"RESIDUAL": True, "FP8": fp8, "BLOCK": 4096},
            {"num_warps": 8},
        )
        yield (
            f"swiglu-fp8={fp8}",
            swiglu_kernel,
            {"gate_up_ptr": "*bf16", "scale_ptr": "*fp32", **out},
            {"FP8": fp8, "BLOCK": 16384 if fp8 else 2048},
            {"num_warps": 16 if fp8 else 4},
        )
    yield (
        "rope",
        rope_kernel,
        {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"},
        {"INTERLEAVED": False, "HEADS": 32, "PAIRS": 64},
        {},
    )
    tile_of_kv = {"HEAD_DIM": 128, "BLOCK_D": 128, "TOKENS": 128}
    for stored, most in (("*i8", 127.0), ("*fp8e4nv", 448.0)) if arch >= 89 else (("*i8", 127.0),):
        kv = {"x_ptr": "*bf16", "out_ptr": "*bf16", "stored_ptr": stored, "scales_ptr": "*fp32"}
        rounding = {"MOST": most, "INTEGERS": stored == "*i8", "ROUNDED": True}
        pointers = {**kv, "rounded_ptr": "*bf16"}
        yield f"quantise_kv-{stored[1:]}", quantise_kernel, pointers, {**tile_of_kv, **rounding}, {"num_warps": 8}
        yield f"dequantise_kv-{stored[1:]}", dequantise_kernel, kv, tile_of_kv, {"num_warps": 8}


def hopper_cases() -> Iterator[Case]:
    """The same of the Gluon kernels, which exist for sm_90 alone."""
    for head_dim, key_block in ((64, 64), (64, 128), (128, 64), (128, 128)):
        layout = gl.NVMMASharedLayout.get_default_for([1, key_block, head_dim], gl.bfloat16)
        tiles = f"tensordesc<bf16[1, {key_block}, {head_dim}],{layout!r}>"
        shape = {"GROUP": 4, "KEY_BLOCK": key_block, "HEAD_DIM": head_dim, "ROWS": 128, "num_warps": 4}
        yield (
            f"gluon_block_sparse_attention-d{head_dim}-k{key_block}",
            block_sparse_attention_gluon.block_sparse_attention_kernel,
            {"q_ptr": "*bf16", "k_desc": tiles, "v_desc": tiles, "out_ptr": "*bf16", "lse_ptr": "*fp32",
             "offsets_ptr": "*i64", "blocks_ptr": "*i32"},
            {**shape, "LIST_HEADS": 8, "LISTS_PER_KV": 1, "ROW_BLOCK": 128, "TILES": 4, "PING_PONG": False,
             "STAGES": 128 * 1024 // (4 * key_block * head_dim)},
            {"num_warps": 4},
        )  # fmt: skip
        yield (
            f"gluon_block_lse-d{head_dim}-k{key_block}",
            block_lse_gluon.block_lse_kernel,
            {"q_ptr": "*bf16", "k_desc": tiles, "rows_ptr": "*i32", "out_ptr": "*fp32"},
            {**shape, "PER_HEAD": 2, "STAGES": 4, "CHUNK": 64},
            {"num_warps": 4},
        )  # fmt: skip


def compiled_shared_bytes(case: Case, arch: int) -> int:
    name, kernel, pointers, constants, options = case
    make_source = GluonASTSource if name.startswith("gluon") else ASTSource
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name in ("eps", "qk_scale") else "i32")
        for name in kernel.arg_names
    }
    at = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    # What a launch with dense tensors of these head sizes finds: without it nothing is loaded asynchronously.
    aligned = [name for name in signature if name.endswith("_ptr") or name.startswith("stride_")]
    source = make_source(
        kernel,
        signature,
        {at[name]: value for name, value in constants.items()},
        {at[name]: [["tt.divisibility", 16]] for name in aligned if name not in constants},
    )
    return int(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared)


def main() -> None:
    arch = int(sys.argv[1])
    only = sys.argv[2:]
    for case in (*cases(arch), *(hopper_cases() if arch == 90 else ())):
        if not only or case[0] in only:
            print(f"{case[0]}\t{compiled_shared_bytes(case, arch)}", flush=True)


if __name__ == "__main__":
    main()
