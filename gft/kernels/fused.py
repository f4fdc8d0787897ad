"""One launch where the torch definition takes dozens: the vote's stochastic rounding, and the step, with Philox inside.

No autotuning: `_move_kernel` writes its input, and a tuner would apply the step once per candidate. Integer arithmetic
throughout; the float products are followed by no addition, so no multiply-add can be fused into them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens × features a program rounds at once, and how often it does so: it writes one partial sum of squares in all.
TILE_TOKENS, TILE_FEATURES, TILES = 64, 64, 2
SQUARES_ROWS, SQUARES_COLUMNS, MOST_TILES = 32, 128, 8  # votes squared at once, and how often one after the other
MOVE_AT_ONCE, MOST_COLUMNS = 4096, 1024  # weights a program moves at once, and how many of a row at most
# The votes' product: tokens a step of its loop, programs that fill a GPU (two a multiprocessor), tokens worth a program.
TILE_K, PROGRAMS, LEAST_TOKENS_A_SPLIT = 128, 264, 512


@triton.jit
def _noise16(element, seed, step, stream, call):
    """philox.noise16 of each element: the half-word (element % 8) of counter element // 8."""
    # Each element draws the whole counter and keeps an eighth of it.
    w0, w1, w2, w3 = _philox(element // 8, seed, step, stream, call)
    lane = (element % 8).to(tl.int32)
    place = lane // 2
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)


@triton.jit
def _high_and_low(word, multiplier: tl.constexpr):
    """The two halves of a 32 × 32 -> 64-bit product, which is one instruction."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(counter, seed, step, stream, call):
    """philox.philox: four words a counter. tl.philox gives the same, but takes its products in two instructions each."""
    c0, zero = counter.to(tl.uint32), counter.to(tl.uint32) * 0
    c1, c2, c3 = zero + call.to(tl.uint32), zero + tl.load(step).to(tl.uint32), zero + stream.to(tl.uint32)
    key = seed.to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high_0, low_0 = _high_and_low(c0, 0xD2511F53)
        high_1, low_1 = _high_and_low(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _noise16_by_eights(counter, seed, step, stream, call):
    """(rows, n) counters -> (rows, 8n) noise: all eight half-words of each, side by side."""
    w0, w1, w2, w3 = _philox(counter, seed, step, stream, call)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (rows, n, 2, 2), whose last two axes count 0, 1, 2, 3
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (counter.shape[0], counter.shape[1] * 8)).to(tl.int32)


# Never specialised on their values: they change from step to step, and 1 would become a constant without a type. The step
# itself is read on the device, where a captured CUDA graph can count it.
STREAM = ["seed", "stream", "call"]


def _on_device(step: int | Tensor, like: Tensor) -> Tensor:
    return step.to(like.device) if isinstance(step, Tensor) else torch.tensor(step, device=like.device)


@triton.jit
def _rounded(value, factor, noise, top):
    fixed = tl.minimum(tl.maximum(value * factor, -top), top).to(tl.int32)
    return ((fixed + noise) >> 16).to(tl.int8)


@triton.jit
def _noise_of_tile(first, row, column, feature_block, features, seed, step, stream, call, BY_EIGHTS: tl.constexpr,
                   FEATURES: tl.constexpr):
    if BY_EIGHTS:
        eighth = feature_block * (FEATURES // 8) + tl.arange(0, FEATURES // 8)
        counter = (first * (features // 8)).to(tl.uint32) + (row[:, None] * (features // 8) + eighth[None, :]).to(tl.uint32)
        return _noise16_by_eights(counter, seed, step, stream, call)
    return _noise16((first + row)[:, None] * features + column[None, :], seed, step, stream, call)


@triton.jit
def _with_care(source, target, factor, first, column, feature_block, tokens, features, top, largest_square,
               seed, step, stream, call, BY_EIGHTS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
               TILES: tl.constexpr):
    """What is NaN or inf becomes 0 and is counted; large squares are bounded."""
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    bad = tl.zeros((TOKENS, FEATURES), tl.int32)
    for tile in range(TILES):
        row = tile * TOKENS + tl.arange(0, TOKENS)
        live = (row < tokens - first)[:, None] & (column < features)[None, :]
        value = tl.load(source + row[:, None] * features + column[None, :], mask=live, other=0.0).to(tl.float32)
        finite = tl.abs(value) < float("inf")  # not so for NaN
        bad += (finite == 0).to(tl.int32)
        value = tl.where(finite, value, 0.0)
        noise = _noise_of_tile(first, row, column, feature_block, features, seed, step, stream, call, BY_EIGHTS, FEATURES)
        tl.store(target + row[None, :], tl.trans(_rounded(value, factor, noise, top)), mask=tl.trans(live))
        total += tl.minimum(value * value, largest_square)
    return tl.sum(total, 0), tl.sum(bad)


@triton.jit(do_not_specialize=STREAM)
def _quantize_kernel(values, factors, out, squares, not_finite, tokens, features, top, largest_square,
                     seed, step, stream, call,
                     EVEN: tl.constexpr, BY_EIGHTS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
                     TILES: tl.constexpr):
    chunk, feature_block = tl.program_id(0), tl.program_id(1)
    column = feature_block * FEATURES + tl.arange(0, FEATURES)
    inside = column < features
    factor = tl.load(factors + column, mask=inside, other=0.0)[None, :]
    first = chunk.to(tl.int64) * (TILES * TOKENS)
    # Tokens last: the votes are a product over tokens, and int8 tensor cores want those side by side.
    source, target = values + first * features, out + column.to(tl.int64)[:, None] * tokens + first
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for tile in tl.static_range(TILES):
        row = tile * TOKENS + tl.arange(0, TOKENS)
        live = None if EVEN else (row < tokens - first)[:, None] & inside[None, :]
        value = tl.load(source + row[:, None] * features + column[None, :], mask=live).to(tl.float32)
        if not EVEN:
            value = tl.where(live, value, 0.0)
        noise = _noise_of_tile(first, row, column, feature_block, features, seed, step, stream, call, BY_EIGHTS, FEATURES)
        q = _rounded(value, factor, noise, top)
        tl.store(target + row[None, :], tl.trans(q), mask=None if EVEN else tl.trans(live))
        total += value * value
    sums = tl.sum(total, 0)
    bad = tl.sum((sums < 0).to(tl.int32))  # none
    # A sum beyond the bound, or none at all, tells of a value that is NaN, inf or too large to be squared: once more, with
    # care. Elsewhere, which is next to always, the care would take a third of the time.
    if tl.sum((sums <= largest_square).to(tl.int32)) < FEATURES:
        sums, bad = _with_care(source, target, factor, first, column, feature_block, tokens, features, top, largest_square,
                               seed, step, stream, call, BY_EIGHTS, TOKENS, FEATURES, TILES)
    tl.store(squares + chunk * features + column, sums, mask=inside)
    tl.store(not_finite + chunk * tl.num_programs(1) + feature_block, bad)


@triton.jit(do_not_specialize=["chunks", "tokens", "programs"])
def _mean_kernel(squares, not_finite, mean, bad, chunks, tokens, programs, features,
                 CHUNKS: tl.constexpr, FEATURES: tl.constexpr):
    """The chunks' sums of squares, added in a fixed order; and how many values were not finite."""
    column = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((CHUNKS, FEATURES), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        live = (chunk < chunks)[:, None] & (column < features)[None, :]
        total += tl.load(squares + chunk[:, None] * features + column[None, :], mask=live, other=0.0)
    tl.store(mean + column, tl.sum(total, 0) / tokens, mask=column < features)
    if tl.program_id(0) == 0:
        count = tl.zeros((1024,), tl.int64)
        for first in range(0, programs, 1024):
            program = first + tl.arange(0, 1024)
            count += tl.load(not_finite + program, mask=program < programs, other=0)
        tl.store(bad, tl.sum(count))


def quantize(values: Tensor,  # (n, features) float
             factors: Tensor,  # (features,) float32: what one is worth, in 1/65536 of q
             *,
             largest: int, largest_squared: float,
             seed: int, step: int | Tensor, stream: int, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """vote.quantize with the noise of philox.noise16, vote.mean_square, and how many values were NaN or inf.

    q is (n, features) int8 and lies in memory feature by feature. Squares are summed in a fixed order.
    """
    values = values.contiguous()
    tokens, features = values.shape
    out = torch.empty(features, tokens, dtype=torch.int8, device=values.device)
    if not values.numel():
        return out.t(), factors.new_zeros(features), factors.new_zeros((), dtype=torch.int64)
    mean, bad = factors.new_empty(features), factors.new_empty((), dtype=torch.int64)
    grid = triton.cdiv(tokens, TILE_TOKENS * TILES), triton.cdiv(features, TILE_FEATURES)
    squares, not_finite = factors.new_empty(grid[0], features), factors.new_empty(grid, dtype=torch.int32)
    even = tokens % (TILE_TOKENS * TILES) == 0 and features % TILE_FEATURES == 0
    with torch.cuda.device_of(values):  # Triton launches on the current device, not on the tensor's
        _quantize_kernel[grid](
            values, factors, out, squares, not_finite, tokens, features, float(largest * 65536), largest_squared**2,
            seed, _on_device(step, values), stream, call,
            EVEN=even, BY_EIGHTS=features % 8 == 0, TOKENS=TILE_TOKENS, FEATURES=TILE_FEATURES, TILES=TILES, num_warps=4)
        _mean_kernel[(triton.cdiv(features, 16),)](squares, not_finite, mean, bad, grid[0], tokens, not_finite.numel(),
                                                   features, CHUNKS=128, FEATURES=16)
    return out.t(), mean, bad


# ---------------------------------------------------------------------------------------------------- the votes


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """A program's rows and columns. Neighbouring programs share some, so that what they read is in the cache."""
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program, in_group = tl.program_id(0), GROUP * tiles_across
    first_down = program // in_group * GROUP
    group_height = tl.minimum(tiles_down - first_down, GROUP)
    down, across = first_down + program % in_group % group_height, program % in_group // group_height
    return down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit(do_not_specialize=["tiles_a_split"])
def _votes_kernel(delta, x, votes, rows, columns, tokens, tiles_a_split,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                  GROUP: tl.constexpr):
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    first = tl.program_id(1) * tiles_a_split
    token = first * TOKENS + tl.arange(0, TOKENS)
    # Rows beyond the edge read row 0 and are not written.
    from_delta = delta + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(tiles_a_split):
        if EVEN:
            a, b = tl.load(from_delta), tl.load(from_x)
        else:
            live = (token + tile * TOKENS < tokens)[None, :]
            a, b = tl.load(from_delta, mask=live, other=0), tl.load(from_x, mask=live, other=0)
        total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        from_delta += TOKENS
        from_x += TOKENS
    place = votes + row.to(tl.int64)[:, None] * columns + column[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if SPLIT:
        tl.atomic_add(place, total, mask=live, sem="relaxed")  # integers: the same in any order
    else:
        tl.store(place, total, mask=live)


def votes_product(delta: Tensor,  # (tokens, rows) int8, tokens side by side in memory
                  x: Tensor) -> Tensor:  # (tokens, columns) int8, likewise -> (rows, columns) int32
    """vote.tally where no sum exceeds int32: delta^T · x on int8 tensor cores."""
    delta, x = delta.t().contiguous(), x.t().contiguous()
    (rows, tokens), columns = delta.shape, x.shape[0]
    tile_rows, tile_columns = (128, 128) if rows * columns >= PROGRAMS * 128 * 128 else (64, 128)
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns)
    # Few tiles leave most of the GPU idle: share the tokens out, too.
    splits = max(1, min(PROGRAMS // tiles, tokens // LEAST_TOKENS_A_SPLIT))
    tiles_a_split = triton.cdiv(tokens, splits * TILE_K)
    splits = triton.cdiv(tokens, tiles_a_split * TILE_K)
    votes = (torch.zeros if splits > 1 else torch.empty)(rows, columns, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _votes_kernel[(tiles, splits)](
            delta, x, votes, rows, columns, tokens, tiles_a_split, EVEN=tokens == splits * tiles_a_split * TILE_K,
            SPLIT=splits > 1, ROWS=tile_rows, COLUMNS=tile_columns, TOKENS=TILE_K, GROUP=8,
            num_warps=4, num_stages=3 if tile_rows == 128 else 4)
    return votes


@triton.jit(do_not_specialize=["sequences", "sequences_a_split"])
def _sequence_votes_kernel(delta, x, votes, rows, columns, sequences, sequence, sequences_a_split,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr,
                           GROUP: tl.constexpr):
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    length = sequences.to(tl.int64) * 0 + sequence
    tokens, token = sequences * length, tl.arange(0, TOKENS)
    from_delta = delta + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    from_x = x + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * tokens + token[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    first = tl.program_id(1) * sequences_a_split
    for one in range(first, tl.minimum(first + sequences_a_split, sequences)):
        voice = tl.zeros((ROWS, COLUMNS), tl.int32)
        for start in range(0, sequence, TOKENS):
            place = one * length + start
            if EVEN:
                a, b = tl.load(from_delta + place), tl.load(from_x + place)
            else:
                live = (start + token < sequence)[None, :]
                a, b = tl.load(from_delta + place, mask=live, other=0), tl.load(from_x + place, mask=live, other=0)
            voice = tl.dot(a, tl.trans(b), voice, out_dtype=tl.int32)
        total += (voice > 0).to(tl.int32) - (voice < 0).to(tl.int32)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.atomic_add(votes + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=live, sem="relaxed")


def sequence_votes(delta: Tensor,  # (tokens, rows) int8
                   x: Tensor,  # (tokens, columns) int8
                   sequence: int) -> Tensor:  # tokens that make one sample -> (rows, columns) int32
    """The sum over sequences of the sign of a sequence's votes (vote._sequence_tally), none of which is ever written."""
    delta, x = delta.t().contiguous(), x.t().contiguous()
    (rows, tokens), columns = delta.shape, x.shape[0]
    sequences, tiles = tokens // sequence, triton.cdiv(rows, 64) * triton.cdiv(columns, 128)
    sequences_a_split = triton.cdiv(sequences, max(1, min(PROGRAMS // tiles, sequences)))
    votes = torch.zeros(rows, columns, dtype=torch.int32, device=x.device)
    at_once = TILE_K if sequence % TILE_K == 0 else TILE_K // 2
    with torch.cuda.device_of(x):
        _sequence_votes_kernel[(tiles, triton.cdiv(sequences, sequences_a_split))](
            delta, x, votes, rows, columns, sequences, sequence, sequences_a_split, ROWS=64, COLUMNS=128, TOKENS=at_once,
            EVEN=sequence % at_once == 0, GROUP=8, num_warps=4, num_stages=3)
    return votes


# ---------------------------------------------------------------------------------------------------- the levels


@triton.jit
def _levels_kernel(stored, levels, rows, columns, bytes_a_row,
                   PACKED: tl.constexpr, WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr,
                   ROWS: tl.constexpr, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    raw = tl.load(stored + row[:, None] * bytes_a_row + byte[None, :], mask=inside, other=0).to(tl.int32)
    if PACKED:
        PER_BYTE: tl.constexpr = 8 // WIDTH
        shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
        level = tl.reshape((raw[:, :, None] >> shift) & ((1 << WIDTH) - 1), (ROWS, BYTES * PER_BYTE)) - TOP_LEVEL
    else:
        PER_BYTE: tl.constexpr = 1
        level = (raw + ((1 << MEMORY_BITS) >> 1)) >> MEMORY_BITS
    column = tl.program_id(1) * BYTES * PER_BYTE + tl.arange(0, BYTES * PER_BYTE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(levels + row[:, None] * columns + column[None, :], level.to(tl.float32).to(levels.dtype.element_ty), mask=live)


def float_levels(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8
                 columns: int, dtype: torch.dtype, *, packed_width: int, top_level: int,
                 memory_bits: int) -> Tensor:  # (rows, columns) of `dtype`
    """grid.Grid.levels as floats, in one pass: the scratch a product reads."""
    stored = stored.contiguous()
    levels = torch.empty(stored.shape[0], columns, dtype=dtype, device=stored.device)
    rows, bytes_a_row = stored.shape
    if levels.numel():
        bytes_at_once = 512 * (packed_width or 8) // 8
        with torch.cuda.device_of(stored):
            _levels_kernel[(triton.cdiv(rows, 4), triton.cdiv(bytes_a_row, bytes_at_once))](
                stored, levels, rows, columns, bytes_a_row, PACKED=packed_width > 0, WIDTH=packed_width or 8,
                TOP_LEVEL=top_level, MEMORY_BITS=memory_bits, ROWS=4, BYTES=bytes_at_once)
    return levels


# ---------------------------------------------------------------------------------------------------- the step


@triton.jit(do_not_specialize=["shift"])
def _squares_kernel(votes, sums, rows, columns, shift, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """sums: the total's high and low half, then rows, then columns. Integers are the same in whatever order atomics add."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by_row = tl.zeros((ROWS,), tl.int64)
    for tile in range(TILES):
        column = (tl.program_id(1) * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        live = (row < rows)[:, None] & (column < columns)[None, :]
        vote = tl.load(votes + row[:, None] * columns + column[None, :], mask=live, other=0)
        small = (vote >> shift).to(tl.int32).to(tl.int64)
        square = small * small
        by_row += tl.sum(square, 1)
        tl.atomic_add(sums + 2 + rows + column, tl.sum(square, 0), mask=column < columns, sem="relaxed")
    tl.atomic_add(sums + 2 + row, by_row, mask=row < rows, sem="relaxed")
    tl.atomic_add(sums, tl.sum(by_row >> 32, 0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(by_row & 0xFFFFFFFF, 0), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "columns", "gain", "shift"])
def _factors_kernel(sums, factors, rows, columns, gain, shift, GAIN_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr):
    if GAIN_ON_DEVICE:
        gain = tl.load(gain)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < rows + columns
    is_row = place < rows
    high, low = tl.load(sums), tl.load(sums + 1)
    total = (high + (low >> 32)).to(tl.float64) * 4294967296.0 + (low & 0xFFFFFFFF).to(tl.float64)
    count = rows.to(tl.int64) * columns
    overall = tl.sqrt(total / count.to(tl.float64)) / (shift.to(tl.int64) * 0 + 1 << shift).to(tl.float64)
    mean = tl.load(sums + 2 + place, mask=live, other=0).to(tl.float64) / tl.where(is_row, columns, rows).to(tl.float64)
    inverse = tl.where(mean > 0, 1.0 / tl.sqrt(tl.where(mean > 0, mean, 1.0)), 0.0)
    factor = tl.where(is_row, inverse * overall * gain, inverse)  # gain widens to float64
    tl.store(factors + place, factor.to(tl.float32), mask=live)


def rounding_factors(votes: Tensor, gain: float | Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """step.rounding_factors: (out, 1) and (1, in) float32. `gain` must be a float32, or one on the device."""
    votes = votes.contiguous()
    rows, columns = votes.shape
    sums = torch.zeros(2 + rows + columns, dtype=torch.int64, device=votes.device)
    factors = torch.empty(rows + columns, dtype=torch.float32, device=votes.device)
    # A program that goes on to the next tile saves atomics; but all of the GPU should have work.
    tiles = max(1, min(MOST_TILES, votes.numel() // (PROGRAMS * SQUARES_ROWS * SQUARES_COLUMNS)))
    grid = triton.cdiv(rows, SQUARES_ROWS), triton.cdiv(columns, SQUARES_COLUMNS * tiles)
    with torch.cuda.device_of(votes):
        _squares_kernel[grid](votes, sums, rows, columns, shift, ROWS=SQUARES_ROWS, COLUMNS=SQUARES_COLUMNS, TILES=tiles)
        _factors_kernel[(triton.cdiv(rows + columns, 512),)](sums, factors, rows, columns, gain, shift,
                                                            GAIN_ON_DEVICE=isinstance(gain, Tensor), BLOCK=512)
    return factors[:rows, None], factors[None, rows:]


@triton.jit
def _moved(old, vote, noise, row_factor, column_factor, cap, follow, least, largest, p_min,
           TOPK: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr):
    """The new values: step.topk or step.rounding."""
    UNIT: tl.constexpr = 1 << MEMORY_BITS
    HALF: tl.constexpr = UNIT // 2
    if TOPK:
        span, size = largest - least, tl.abs(vote.to(tl.int64))
        chance = tl.where(span > 0, (size - least) * 65536 // tl.maximum(span, 1), 65536)
        chance = tl.minimum(tl.maximum(chance, p_min), 65536)
        moves = (size >= least) & (size > 0) & (noise < chance)
        move = tl.where(moves, tl.where(vote > 0, UNIT, -UNIT), 0)
    else:
        share = vote.to(tl.float32) * row_factor * column_factor
        move = (tl.minimum(tl.maximum(share, -cap), cap).to(tl.int32) + noise) >> 16
    if TOPK or MEMORY_BITS == 0:
        return tl.minimum(tl.maximum(old - move, -TOP_LEVEL * UNIT), TOP_LEVEL * UNIT)
    level = (old + HALF) >> MEMORY_BITS
    z = old - level * HALF - move  # old - level · UNIT + level · HALF
    z = tl.minimum(tl.maximum(z, -TOP_LEVEL * HALF), TOP_LEVEL * HALF)
    z = tl.minimum(tl.maximum(z, (level - 1) * HALF), (level + 1) * HALF - 1)
    nearest = (z + HALF // 2 - ((noise >> 8) & 1)) >> (MEMORY_BITS - 1)
    return tl.where((noise & 255) < follow, nearest, level) * HALF + z


@triton.jit(do_not_specialize=[*STREAM, "cap", "p_min", "follow"])
def _move_kernel(stored, votes, row_factor, column_factor, least, largest, flips, rows, columns, bytes_a_row, cap, p_min,
                 follow, seed, step, stream, call,
                 TOPK: tl.constexpr, CAP_ON_DEVICE: tl.constexpr, BY_EIGHTS: tl.constexpr, PACKED: tl.constexpr,
                 WIDTH: tl.constexpr, TOP_LEVEL: tl.constexpr, MEMORY_BITS: tl.constexpr, ROWS: tl.constexpr,
                 BYTES: tl.constexpr):
    if CAP_ON_DEVICE:
        cap = tl.load(cap)
        follow = tl.where(cap > 0, follow, 0)  # at a lr of 0 nothing follows
    PER_BYTE: tl.constexpr = 8 // WIDTH
    COLUMNS: tl.constexpr = BYTES * PER_BYTE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = stored + row[:, None] * bytes_a_row + byte[None, :]
    inside = (row < rows)[:, None] & (byte < bytes_a_row)[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    raw = tl.load(here, mask=inside, other=0).to(tl.int32)
    if PACKED:
        shift = WIDTH * tl.arange(0, PER_BYTE)[None, None, :]
        old = tl.reshape((raw[:, :, None] >> shift) & ((1 << WIDTH) - 1), (ROWS, COLUMNS)) - TOP_LEVEL
    else:
        old = raw
    element = row[:, None] * columns + column[None, :]
    vote = tl.load(votes + element, mask=live, other=0)
    if BY_EIGHTS:
        eighth = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        noise = _noise16_by_eights(row[:, None] * (columns // 8) + eighth[None, :], seed, step, stream, call)
    else:
        noise = _noise16(element, seed, step, stream, call)
    if TOPK:
        new = _moved(old, vote, noise, 0.0, 0.0, cap, follow, tl.load(least), tl.load(largest), p_min,
                     TOPK, TOP_LEVEL, MEMORY_BITS)
    else:
        by_row = tl.load(row_factor + row, mask=row < rows, other=0.0)[:, None]
        by_column = tl.load(column_factor + column, mask=column < columns, other=0.0)[None, :]
        new = _moved(old, vote, noise, by_row, by_column, cap, follow, 0, 0, p_min, TOPK, TOP_LEVEL, MEMORY_BITS)
    HALF: tl.constexpr = (1 << MEMORY_BITS) // 2
    changed = live & (((new + HALF) >> MEMORY_BITS) != ((old + HALF) >> MEMORY_BITS))
    if PACKED:
        code = tl.reshape(tl.where(live, new + TOP_LEVEL, 0), (ROWS, BYTES, PER_BYTE)) << shift
        tl.store(here, tl.sum(code, 2).to(tl.uint8), mask=inside)
    else:
        tl.store(here, new.to(tl.int8), mask=inside)
    tl.atomic_add(flips, tl.sum(changed.to(tl.int32)).to(tl.int64))


def move(stored: Tensor,  # (rows, bytes) uint8 or (rows, columns) int8, changed in place
         votes: Tensor,  # (rows, columns) int32 or int64
         columns: int,
         *,
         packed_width: int,  # bits of a packed level, 0 if stored with memory
         top_level: int,
         memory_bits: int,
         follow: int,
         seed: int, step: int | Tensor, stream: int, call: int,
         row: Tensor | None = None, column: Tensor | None = None, cap: float | Tensor = 0.0,  # step.Rounding
         least: Tensor | None = None, largest: Tensor | None = None, p_min: int = 0) -> Tensor:  # step.TopK
    """step.rounding or step.topk on a whole stored matrix, in place. Returns how many levels changed."""
    flips = torch.zeros((), dtype=torch.int64, device=stored.device)
    votes = votes.contiguous()
    unused = flips
    rows, bytes_a_row = stored.shape
    if stored.numel():
        columns_at_once = max(8, min(MOST_COLUMNS, triton.next_power_of_2(columns)))
        rows_at_once, bytes_at_once = MOVE_AT_ONCE // columns_at_once, columns_at_once * (packed_width or 8) // 8
        with torch.cuda.device_of(stored):
            _move_kernel[(triton.cdiv(rows, rows_at_once), triton.cdiv(bytes_a_row, bytes_at_once))](
                stored, votes, *(unused if one is None else one.contiguous() for one in (row, column, least, largest)),
                flips, rows, columns, bytes_a_row, cap, p_min, follow, seed, _on_device(step, stored), stream, call,
                TOPK=least is not None, CAP_ON_DEVICE=isinstance(cap, Tensor), BY_EIGHTS=columns % 8 == 0,
                PACKED=packed_width > 0, WIDTH=packed_width or 8, TOP_LEVEL=top_level, MEMORY_BITS=memory_bits,
                ROWS=rows_at_once, BYTES=bytes_at_once)
        torch.autograd.graph.increment_version(stored)  # autograd does not see what a kernel writes
    return flips
