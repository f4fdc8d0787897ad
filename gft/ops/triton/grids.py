"""Long launches: a grid's second and third size may not exceed 65,535, so a long second one goes on in the third.

No division, as one long first size would take: in a kernel of short programs that shows.
"""

import triton
import triton.language as tl

MOST = 65_535


def spread(blocks: int) -> tuple[int, int]:
    """Sizes two and three of a grid for so many blocks; with a few programs more than blocks where one size is too short."""
    return min(blocks, MOST), -(-blocks // MOST)


@triton.jit
def spread_block():
    """The number of a program's block, of those that `spread` has laid out."""
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
