"""The Triton kernels of ``passes/norm_rope.py`` and ``attention_kernels.py``. Imported only where there is Triton."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({}, num_warps=8)], key=[])
@triton.jit
def norm_rope_kernel(
    x,
    scale,
    rotations,
    out,
    first,
    last,
    heads,
    x_batch,
    x_token,
    x_head,
    rotations_batch,
    rotations_token,
    out_batch,
    out_token,
    out_head,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norm and rotate one token's heads, ``HEADS`` of them; the rotation is read once for all.

    Channels of a head are neighbours. A rotation is [WIDTH / 2, 2, 2], one matrix for each pair of channels. Rotations
    beyond ``last`` are not there: nothing says that a call brings one for each token.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    channel = tl.arange(0, WIDTH)[None, :]
    is_head = head < heads

    values = tl.load(x + batch * x_batch + token * x_token + head * x_head + channel, mask=is_head, other=0.0)
    exact = values.to(tl.float32)
    rms = tl.math.rsqrt(tl.sum(exact * exact, axis=1, keep_dims=True) / WIDTH + eps)
    normed = exact * rms * tl.load(scale + channel).to(tl.float32)
    normed = normed.to(values.dtype).to(tl.float32)  # as the norm rounds it, which is an operator of its own elsewhere

    entries = tl.arange(0, WIDTH * 2)
    rotation = tl.minimum(token + first, last)
    matrix = tl.load(rotations + batch * rotations_batch + rotation * rotations_token + entries)
    columns = tl.reshape(matrix, (1, WIDTH // 2, 2, 2))
    for_even, for_odd = tl.split(columns)
    even_even, odd_even = tl.split(for_even)
    even_odd, odd_odd = tl.split(for_odd)
    even, odd = tl.split(tl.reshape(normed, (HEADS, WIDTH // 2, 2)))
    rotated = tl.join(even_even * even + even_odd * odd, odd_even * even + odd_odd * odd)
    place = out + batch * out_batch + (token + first) * out_token + head * out_head + channel
    tl.store(place, tl.reshape(rotated, (HEADS, WIDTH)).to(values.dtype), mask=is_head)


@triton.jit
def softmax_kernel(scores, out, scale, columns, IS_HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Write the softmax of one row of ``scale · scores`` to ``out``: float32 to float16 or else bfloat16.

    Both are contiguous and given as addresses, since a pointer's memory is asked for when a kernel is launched.
    """
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    there = column < columns
    values = tl.load(scores.to(tl.pointer_type(tl.float32)) + row + column, mask=there, other=float("-inf")) * scale
    powers = tl.exp(values - tl.max(values, 0))
    shares = powers / tl.sum(powers, 0)
    if IS_HALF:
        tl.store(out.to(tl.pointer_type(tl.float16)) + row + column, shares.to(tl.float16), mask=there)
    else:
        tl.store(out.to(tl.pointer_type(tl.bfloat16)) + row + column, shares.to(tl.bfloat16), mask=there)
