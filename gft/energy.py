"""The paper's accounting: updates, bits and the energy of the optimizer step (Section 4.4).

These are estimates on paper, of the optimizer step alone, with FP32 operation costs at 7 nm. They reproduce the
columns of the paper's tables; docs/paper.md says where the constants come from.
"""

PICOJOULE = 1e-12
ADAMW_PJ = 14.62  # a parameter and step: 10 FP32 multiplications at 1.31 pJ and 4 additions at 0.38 pJ
GFT_TERNARY_PJ = 4.8  # a quantized weight and step
GFT_PJ = 5.18  # the same with more than 2 bits, where levels are multiplied by 1/I
MOVED_SHARE = 0.18  # of the quantized weights a step, as the tables have it (k = 0.375 on average, half of which move)


def bits_total(fp32_params: int, quantized_params: int, bits: int) -> int:
    """Size of the model in bits: 32 a float parameter, `bits` an integer weight."""
    return 32 * fp32_params + bits * quantized_params


def updates_estimated(fp32_params: int, quantized_params: int, steps: int) -> float:
    """Parameters written during training: every float parameter each step, and 18 % of the integer weights."""
    return steps * (fp32_params + MOVED_SHARE * quantized_params)


def energy_estimate_j(fp32_params: int, quantized_params: int, bits: int, steps: int) -> float:
    """Joules of all optimizer steps."""
    gft = GFT_TERNARY_PJ if bits == 2 else GFT_PJ
    return steps * PICOJOULE * (ADAMW_PJ * fp32_params + gft * quantized_params)
