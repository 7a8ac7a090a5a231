"""Local correlation of two images: the operations voxel by voxel before and after the blur over windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = 1024
"""Voxels that a program processes."""


@triton.jit
def _voxels(voxels, BLOCK: constexpr):
    """Offsets of a program's voxels in (images, voxels), a mask of those that exist, and the distance between parts of
    (parts, images, voxels)."""
    image, images = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return image * voxels + voxel, voxel < voxels, images * voxels


@triton.jit
def _centred(first, second, centres, at, mask):
    """Both images, (images, voxels), measured from their centres, (2, images)."""
    image, images = tl.program_id(1), tl.num_programs(1)
    a = tl.load(first + at, mask=mask) - tl.load(centres + image)
    return a, tl.load(second + at, mask=mask) - tl.load(centres + images + image)


@triton.jit
def _products(first, second, centres, moments, voxels, BLOCK: constexpr):
    """moments (5, images, voxels): a, a², a·b, b, b² of the images a and b measured from their centres."""
    at, mask, step = _voxels(voxels, BLOCK)
    a, b = _centred(first, second, centres, at, mask)
    tl.store(moments + at, a, mask=mask)
    tl.store(moments + at + step, a * a, mask=mask)
    tl.store(moments + at + 2 * step, a * b, mask=mask)
    tl.store(moments + at + 3 * step, b, mask=mask)
    tl.store(moments + at + 4 * step, b * b, mask=mask)


@triton.jit
def _covariance(product, mean1, mean2, centre1, centre2, inside):
    return product - mean1 * mean2 + (1 - inside) * (centre1 * mean2 + centre2 * mean1 + centre1 * centre2 * inside)


@triton.jit
def _correlate(
    moments,  # (5, images, voxels), blurred
    centres,  # (2, images)
    inside,  # (voxels)
    gradient,  # (images, voxels), for BACKWARD
    out,  # (images, voxels), or for BACKWARD (3 or 5, images, voxels)
    voxels,
    epsilon,
    BACKWARD: constexpr,
    SECOND: constexpr,
    BLOCK: constexpr,
):
    at, mask, step = _voxels(voxels, BLOCK)
    image, images = tl.program_id(1), tl.num_programs(1)
    a, aa = tl.load(moments + at, mask=mask, other=0.0), tl.load(moments + at + step, mask=mask, other=0.0)
    ab = tl.load(moments + at + 2 * step, mask=mask, other=0.0)
    b = tl.load(moments + at + 3 * step, mask=mask, other=0.0)
    bb = tl.load(moments + at + 4 * step, mask=mask, other=0.0)
    ca, cb = tl.load(centres + image), tl.load(centres + images + image)
    full = tl.load(inside + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), mask=mask, other=1.0)
    variance_a, variance_b = _covariance(aa, a, a, ca, ca, full), _covariance(bb, b, b, cb, cb, full)
    safe_a, safe_b = tl.maximum(variance_a, 0.0) + epsilon, tl.maximum(variance_b, 0.0) + epsilon
    scale = 1 / tl.sqrt(safe_a * safe_b)
    correlation = _covariance(ab, a, b, ca, cb, full) * scale
    if BACKWARD:
        g = tl.load(gradient + at, mask=mask, other=0.0)
        by_ab = g * scale
        by_aa = tl.where(variance_a >= 0, -0.5 * g * correlation / safe_a, 0.0)
        shift_a, shift_b = (1 - full) * ca - a, (1 - full) * cb - b
        tl.store(out + at, by_ab * shift_b + 2 * by_aa * shift_a, mask=mask)
        tl.store(out + at + step, by_aa, mask=mask)
        tl.store(out + at + 2 * step, by_ab, mask=mask)
        if SECOND:
            by_bb = tl.where(variance_b >= 0, -0.5 * g * correlation / safe_b, 0.0)
            tl.store(out + at + 3 * step, by_ab * shift_a + 2 * by_bb * shift_b, mask=mask)
            tl.store(out + at + 4 * step, by_bb, mask=mask)
    else:
        tl.store(out + at, correlation, mask=mask)


@triton.jit
def _products_backward(
    first, second, centres, gradient, by_first, by_second, voxels, SECOND: constexpr, BLOCK: constexpr
):
    """The gradient of `_products`, from that of its first 3 or all 5 moments."""
    at, mask, step = _voxels(voxels, BLOCK)
    a, b = _centred(first, second, centres, at, mask)
    by_ab = tl.load(gradient + at + 2 * step, mask=mask)
    by_a, by_aa = tl.load(gradient + at, mask=mask), tl.load(gradient + at + step, mask=mask)
    tl.store(by_first + at, by_a + 2 * a * by_aa + b * by_ab, mask=mask)
    if SECOND:
        by_b, by_bb = tl.load(gradient + at + 3 * step, mask=mask), tl.load(gradient + at + 4 * step, mask=mask)
        tl.store(by_second + at, by_b + 2 * b * by_bb + a * by_ab, mask=mask)


Blur = Callable[[Tensor], Tensor]


def local_correlation(first: Tensor, second: Tensor, blur: Blur, epsilon: float) -> Tensor:
    """Correlation of two images (B, C, *shape) in float32 within the windows that `blur` averages over.

    `blur` has to continue images by zeros, and to be symmetric, so that it is its own gradient.
    """
    result: Tensor = _LocalCorrelation.apply(first, second, blur, epsilon)  # type: ignore[no-untyped-call]
    return result


class _LocalCorrelation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, blur: Blur, epsilon: float) -> Tensor:
        first, second = first.contiguous(), second.contiguous()
        images, voxels = first.shape[:2].numel(), first.shape[2:].numel()
        centres = torch.stack([image.flatten(2).mean(dim=2) for image in (first, second)])
        inside = blur(torch.ones_like(first[:1, :1]))
        moments = first.new_empty(5, *first.shape)
        grid = triton.cdiv(voxels, BLOCK), images
        _products[grid](first, second, centres, moments, voxels, BLOCK=BLOCK)
        moments = blur(moments.flatten(0, 1)).contiguous()
        out = torch.empty_like(first)
        _correlate[grid](moments, centres, inside, out, out, voxels, epsilon, BACKWARD=False, SECOND=False, BLOCK=BLOCK)
        ctx.save_for_backward(first, second, centres, inside, moments)
        ctx.grid, ctx.blur, ctx.epsilon = grid, blur, epsilon
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first, second, centres, inside, moments = ctx.saved_tensors
        need_first, need_second, _, _ = ctx.needs_input_grad
        voxels = inside.numel()
        by_moments = first.new_empty(5 if need_second else 3, *first.shape)
        inputs = (moments, centres, inside, gradients[0].contiguous())
        options = {"BACKWARD": True, "SECOND": need_second, "BLOCK": BLOCK}
        _correlate[ctx.grid](*inputs, by_moments, voxels, ctx.epsilon, **options)
        by_moments = ctx.blur(by_moments.flatten(0, 1)).contiguous()
        by_first = torch.empty_like(first)
        by_second = torch.empty_like(second) if need_second else by_first
        _products_backward[ctx.grid](
            first, second, centres, by_moments, by_first, by_second, voxels, SECOND=need_second, BLOCK=BLOCK
        )
        return by_first if need_first else None, by_second if need_second else None, None, None
