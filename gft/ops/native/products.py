"""Products of bytes: the votes (votes.h), and x or grad_output in whole numbers times levels (tokens.h)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gft.ops import checks
from gft.ops.activations import MeanSquare, take_mean
from gft.ops.levels import PLAIN, Scaling
from gft.ops.lowprecision import FIXED, INT8, LARGEST, MOST_FEATURES, SMALLEST, Tokens
from gft.ops.native.interface import ProductJob, ToIntJob, TokensJob, VotesJob
from gft.ops.native.memory import empty, scratch
from gft.ops.native.threads import functions, side_by_side
from gft.ops.products import EXACT_IN_FLOAT32

DIGITS = 3  # of 8 bits in a number of fixed point, as tokens.h has it
ROWS_OF_VOTES = 64  # as many as votes.h packs at once


def votes_product(grad_output: Tensor, x: Tensor, into: Tensor | None = None, means: Sequence[MeanSquare] = ()) -> Tensor:
    """Multiply int8 matrices exactly (products.votes_product); what is added to others, the definition adds."""
    checks.check_pair(grad_output, x)
    if not checks.are_int8(grad_output, x) or into is not None:
        return NotImplemented
    for one in means:
        take_mean(*one)
    c = functions()
    panel = c.gft_panel_columns()
    if panel == 0 or not (grad_output.numel() and x.numel()):
        return _float_product(grad_output, x)
    grad_output, x = grad_output.contiguous(), x.contiguous()
    (tokens, rows), columns = grad_output.shape, x.shape[1]
    panels, group = -(-columns // panel), c.gft_group_tokens()
    packed = torch.empty(panels * panel, c.gft_packed_groups(tokens), group, dtype=torch.uint8)
    votes = scratch.borrow((rows, columns), torch.int32)
    job = VotesJob(grad_output.data_ptr(), x.data_ptr(), packed.data_ptr(), votes.data_ptr(), tokens, rows, columns)
    side_by_side(c.gft_pack_x, job, panels, x.numel())
    side_by_side(c.gft_votes, job, rows, votes.numel(), ROWS_OF_VOTES)
    return votes


def _float_product(grad_output: Tensor, x: Tensor) -> Tensor:
    """The same for a processor without a product of bytes: a float32 sum is exact below 2^24."""
    votes: Tensor | None = None
    shape = grad_output.shape[1], x.shape[1]
    with torch.autocast("cpu", enabled=False):
        for some_grad, some_x in zip(grad_output.split(EXACT_IN_FLOAT32), x.split(EXACT_IN_FLOAT32), strict=True):
            part = torch.mm(some_grad.float().t(), some_x.float(), out=empty(shape, torch.float32))
            votes = _as_int32(part) if votes is None else votes.add_(_as_int32(part))
    assert votes is not None  # split gives at least one piece
    return votes


def _as_int32(whole: Tensor) -> Tensor:  # float32, contiguous, whole numbers
    """The same numbers as int32, in the same memory: `whole` is not to be used any more."""
    side_by_side(functions().gft_to_int, ToIntJob(whole.data_ptr()), whole.numel(), whole.numel())
    return whole.view(torch.int32)


def round_tokens(values: Tensor, dtype: torch.dtype, scaling: Scaling = PLAIN, by_feature: Tensor | None = None) -> Tokens:
    """Round each token on a scale of its own (lowprecision.round_tokens); floats of 8 bits are left to torch."""
    checks.check_values(values, by_feature, None)
    checks.check_gain(scaling.log_gain, values.device)
    if values.dtype not in checks.FLOATS or dtype not in (INT8, FIXED) or not values.numel():
        return NotImplemented
    values = values.float().contiguous()
    by_feature = None if by_feature is None else by_feature.contiguous()
    q, scale = scratch.borrow(values.shape, dtype), torch.empty(len(values), dtype=torch.float32)
    factor = float(Scaling(None, *scaling[1:]).factors())
    job = TokensJob(values.data_ptr(), _address(by_feature), q.data_ptr(), scale.data_ptr(), values.shape[1],
                    LARGEST[dtype], SMALLEST, factor, dtype is INT8)
    side_by_side(functions().gft_round_tokens, job, len(values), values.numel())
    return Tokens(q, scale)


def multiply_tokens(tokens: Tokens, levels: Tensor, dtype: torch.dtype, by_output: Tensor | None = None) -> Tensor:
    """q · levels^T on the tokens' scales (lowprecision.multiply_tokens). Levels may lie either way round."""
    checks.check_tokens(tokens, levels, by_output)
    c, (q, scale) = functions(), tokens
    panel = c.gft_panel_columns()
    if (panel == 0 or dtype not in checks.FLOATS or q.dtype not in (INT8, FIXED) or not (q.numel() and levels.numel())
            or q.shape[1] > MOST_FEATURES):
        return NotImplemented
    (count, features), outputs = q.shape, len(levels)
    q, scale, by_output = q.contiguous(), scale.contiguous(), None if by_output is None else by_output.contiguous()
    panels, tile, group = -(-outputs // panel), c.gft_tile_tokens(), c.gft_group_tokens()
    tiles, groups, digits = -(-count // tile), c.gft_packed_groups(features), 1 if q.dtype is INT8 else DIGITS
    packed_levels = scratch.borrow((panels * panel, groups, group), torch.uint8)
    packed_tokens = scratch.borrow((tiles, digits, groups, tile, group), torch.int8)
    starts = torch.empty(tiles, digits, tile, dtype=torch.int32)
    y = scratch.borrow((count, outputs))
    turned = levels.t().is_contiguous() and not levels.is_contiguous()
    levels = levels if turned else levels.contiguous()
    job = ProductJob(q.data_ptr(), levels.data_ptr(), scale.data_ptr(), _address(by_output), packed_levels.data_ptr(),
                     packed_tokens.data_ptr(), starts.data_ptr(), y.data_ptr(), count, features, outputs, q.dtype is INT8)
    if turned:  # as x lies for its votes
        as_x = VotesJob(None, levels.data_ptr(), packed_levels.data_ptr(), None, features, 0, outputs)
        side_by_side(c.gft_pack_x, as_x, panels, levels.numel())
    else:
        side_by_side(c.gft_pack_levels, job, panels, levels.numel())
    side_by_side(c.gft_pack_tokens, job, tiles, q.numel())
    side_by_side(c.gft_multiply_tokens, job, tiles, y.numel())
    return y.to(dtype)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
