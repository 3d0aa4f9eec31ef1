"""Candidates for a8w8: int8 or fp8 operands, a float32 scale per row of X and per row of W, bfloat16 out.

out[m, n] = (sum over k of X[m, k] * W[n, k]) * xs[m] * ws[n]. int8 and both fp8 formats are exact in bfloat16, so the
dequantising candidates lose nothing before the product. Scaling is always within the time. Dequantising W is too,
unless the name says `predequant`: such a candidate keeps W dequantised, more memory for speed.
"""

from __future__ import annotations

import torch

from worker.tuners.common.problem import Problem
from worker.tuners.torch import eight_bits as eight
from worker.tuners.torch.candidate import Variant


def variants(p: Problem, gpu: bool) -> list[Variant]:
    """The table, the most promising first. Numbers are part of kernelId: never reuse one."""
    int8 = p.dtype == "int8"
    acc = 8 * p.m * p.n
    nk, mk = p.n * p.k, p.m * p.k
    table: list[Variant] = []
    if int8:
        table += [
            Variant(1, "int_mm_wnk", "nk", eight.int_mm(kn=False), every_mode=True, buffer_bytes=acc),
            Variant(2, "int_mm_wkn", "kn", eight.int_mm(kn=True), every_mode=True, buffer_bytes=acc),
        ]
        table += [
            Variant(10 + s, f"int_mm_wkn_splitk{s}", "kn", eight.int_mm_split(s), split_k=s, buffer_bytes=acc * (s + 1))
            for s in (2, 4)
            if p.k >= 64 * s
        ]
        if gpu:
            table.append(
                Variant(3, "int_mm_wnk_pad32", "nk", eight.int_mm_padded, buffer_bytes=acc + 32 * (p.k + 4 * p.n))
            )
        else:
            table.append(
                Variant(4, "weight_int8pack_wnk", "nk", eight.weight_int8, every_mode=True, buffer_bytes=2 * mk)
            )
    else:
        table.append(Variant(20, "scaled_mm_rowwise_wnk", "nk", eight.scaled_mm_rows))
        if gpu:
            table.append(Variant(21, "scaled_mm_rowwise_fastacc_wnk", "nk", eight.scaled_mm_rows_fast))
            table.append(
                Variant(22, "scaled_mm_tensor_wnk", "nk", eight.scaled_mm_tensor, every_mode=True, buffer_bytes=acc)
            )
        table.append(Variant(36, "deq_lut_bf16_wnk_nchunk", "nk", eight.deq_lut_blocks, every_mode=not gpu,
                             buffer_bytes=2 * mk + 6 * eight.BLOCK * p.k + acc))  # fmt: skip
        table.append(Variant(37, "deq_lut_bf16_wnk", "nk", eight.deq_lut, buffer_bytes=2 * mk + 6 * nk + acc))
    table += [
        Variant(30, "predequant_bf16_wnk", "bf16", eight.predequant(torch.bfloat16), every_mode=True,
                buffer_bytes=2 * mk + acc),
        Variant(31, "deq_bf16_wnk", "nk", eight.deq(torch.bfloat16), buffer_bytes=2 * (mk + nk) + acc),
        Variant(32, "deq_bf16_wnk_nchunk", "nk", eight.deq_blocks, every_mode=int8 and not gpu,
                buffer_bytes=2 * (mk + eight.BLOCK * p.k) + acc),
        Variant(33, "deq_f32_wnk", "nk", eight.deq(torch.float32), buffer_bytes=4 * (mk + nk) + acc),
        Variant(34, "predequant_f32_wnk", "f32", eight.predequant(torch.float32), buffer_bytes=4 * mk + acc),
    ]  # fmt: skip
    if not gpu:
        table.append(
            Variant(
                35, "predequant_bf16_wpacked", "packed", eight.predequant_packed, every_mode=True, buffer_bytes=2 * mk
            )
        )
    return table
