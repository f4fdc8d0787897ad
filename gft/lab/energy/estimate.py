"""Estimates on paper: how many operations a training step has, times what an operation costs on a chip.

The paper's own (Section 4.4) counts the optimizer step alone, in FP32 operations at 7 nm:

    updates = steps · (P_fp32 + 0.18 · P_q)                              P_fp32 float parameters, P_q integer weights
    bits    = 32 · P_fp32 + bits · P_q
    energy  = steps · (14.62 pJ · P_fp32 + g · P_q)                      g = 4.8 pJ at 2 bits, 5.18 pJ at 3 and 4

A step also has to compute the loss and its errors, which costs some hundred times more than the optimizer does.
`step_energy` counts these products too: for a layer of P weights that sees n rows a step,

    forward         y     = x · W^T               n · P multiply-adds
    input error     d_x   = d · W                 n · P, but none for a layer that sees data
    weight          d^T · x                       n · P: in floats for AdamW, in int8 with int32 sums for GFT's votes

and attention's two products, with no weights. Orthogonalizing the votes adds products to the optimizer's step that do not
depend on n (`orthogonalize_j`): hundreds of times what the paper counts for it, little beside n · P where n is large. A
running mean of votes adds some operations a weight (`rule_extras_j`). Left out of all: memory traffic, norms, activations,
softmax, the loss, the rounding of x and d for the votes, random numbers. On a real chip memory traffic is the larger part;
only a measurement (meter.py) has it.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gft.errors import UsageError
from gft.lab.recipe import Integers
from gft.layers import QuantLayer
from gft.rules import lowrank
from gft.rules.matrices import newton_schulz_multiply_adds

PICOJOULE = 1e-12


class Operation(NamedTuple):
    """pJ."""

    add: float
    multiply: float


# The paper prints none of these and cites BitNet (Wang et al. 2023) and PokeBNN (Zhang et al. 2022) for them. fp32, fp16 and
# int8 are BitNet's table, which has its 45 nm column from Horowitz (2014) and its 7 nm column from PokeBNN; int32 stands
# beside them in Horowitz at 45 nm and in Jouppi et al. (2021) at 7 nm. Neither has bf16 at both: it is charged as fp16.
OPERATIONS = {
    "7nm": {"fp32": Operation(0.38, 1.31), "fp16": Operation(0.16, 0.34), "int8": Operation(0.007, 0.07),
            "int32": Operation(0.03, 1.48)},
    "45nm": {"fp32": Operation(0.9, 3.7), "fp16": Operation(0.4, 1.1), "int8": Operation(0.03, 0.2),
             "int32": Operation(0.1, 3.1)},
}
NODES = tuple(OPERATIONS)
PRECISIONS = {"fp32": ("fp32", "fp32"), "fp16": ("fp16", "fp32"), "bf16": ("fp16", "fp32"), "int8": ("int8", "int32")}
"""What a product multiplies in, and what it sums up in."""


def operations(node: str) -> dict[str, Operation]:
    if node not in OPERATIONS:
        raise UsageError(f"node={node!r}: choose one of {', '.join(NODES)}")
    return OPERATIONS[node]


# ---------------------------------------------------------------------------------------------------- the paper's columns

MOVED_SHARE = 0.18  # of the integer weights a step, in the tables' updates; the text's mean k · p_change is 0.375 · 0.5
K, P_CHANGE = 0.75, 0.5  # what the text assumes for the energy: k as it is at the start, and never decaying
PRINTED_PJ = 4.8  # of an integer weight and step at 7 nm, as the text has it and the tables use it
LISTED_ADDITIONS = 1 + K + 1 + P_CHANGE * K  # top-k, comparing with the chance, moving by one level: 3.125


def bits_total(fp32_params: int, quantized_params: int, bits: int) -> int:
    """Size of the model in bits: 32 a float parameter, `bits` an integer weight."""
    return 32 * fp32_params + bits * quantized_params


def updates_estimated(fp32_params: int, quantized_params: int, steps: int) -> float:
    """Parameters written during training: every float parameter each step, and 18 % of the integer weights.

    A run knows better: `updates_actual` of its result.json counts the levels that changed.
    """
    return steps * (fp32_params + MOVED_SHARE * quantized_params)


def moved_share(updates_actual: float, fp32_params: int, quantized_params: int, steps: int) -> float:
    """Of the integer weights, how many a step changed in a run: what the tables take to be 0.18."""
    if not quantized_params:
        raise UsageError("no integer weight in this run, so there is no share that moved; give a run with quantized_params")
    return (updates_actual - steps * fp32_params) / (steps * quantized_params)


def adamw_step_pj(node: str = "7nm", additions: int = 4) -> float:
    """AdamW's step for one parameter: 10 multiplications and some additions in FP32.

    additions: 4 give the 14.62 pJ of the paper; its text counts 3, which would be 14.24.
    """
    fp32 = operations(node)["fp32"]
    return 10 * fp32.multiply + additions * fp32.add


def gft_step_pj(bits: int, node: str = "7nm", *, listed: bool = False, moved: float | None = None) -> float:
    """The step of one integer weight.

    listed: False is what the paper's tables use, 4.8 pJ, and 0.38 more above 2 bits. True adds up what its text lists:
        3.125 FP32 additions, and above 2 bits one multiplication; a quarter of the former. We know no reading of the
        list that gives 4.8. At 45 nm, of which the paper has no number, 4.8 pJ are taken for the 12.6 additions they pay
        for at 7 nm.
    moved: the share of weights that change in a step (`moved_share`). The text has 0.375 of them, k = 0.75 times a chance
        of 0.5, and each costs an addition; at 0 that part of the step is free, at 1 it is paid for every weight.
    """
    fp32 = operations(node)["fp32"]
    additions = LISTED_ADDITIONS if listed else PRINTED_PJ / OPERATIONS["7nm"]["fp32"].add
    if moved is not None:
        if not 0 <= moved <= 1:
            raise UsageError(f"moved={moved}: a share of the weights lies between 0 and 1")
        additions += moved - P_CHANGE * K
    scaling = 0.0 if bits == 2 else fp32.multiply if listed else fp32.add
    return additions * fp32.add + scaling


def energy_estimate_j(fp32_params: int, quantized_params: int, bits: int, steps: int, node: str = "7nm",
                      moved: float | None = None) -> float:
    """Joules of all optimizer steps, by the paper's numbers; `moved` as in `gft_step_pj`."""
    gft = gft_step_pj(bits, node, moved=moved) if quantized_params else 0.0
    return steps * PICOJOULE * (adamw_step_pj(node) * fp32_params + gft * quantized_params)


# ---------------------------------------------------------------------------------------------------- the products as well


@dataclass(frozen=True)
class Product:
    """One matrix product of the forward pass, and what the backward pass needs for it."""

    name: str
    macs: int  # multiply-adds of the forward product, a step
    quantized: bool = False  # its weights are integers, which get votes instead of a gradient
    weights: bool = True  # False: attention's products, where both sides are activations
    error: bool = True  # False: it sees data, to which no error flows


@dataclass(frozen=True)
class Joules:
    """One training step, by what the joules go into."""

    forward: float
    error: float
    weight: float  # gradients for AdamW, votes for GFT
    optimizer: float

    @property
    def total(self) -> float:
        return self.forward + self.error + self.weight + self.optimizer


LAYERS = (nn.Linear, nn.Conv2d, QuantLayer)


def products(model: nn.Module, x: Tensor, quantized: Collection[str] = ()) -> list[Product]:
    """Run `model` once on a batch `x` and note its products; `quantized` names the layers whose weights are integers.

    A float model and a batch on the meta device serve best: nothing is allocated or computed. Causal attention counts in
    full, as a kernel that skips nothing would do it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules() if isinstance(module, LAYERS)}
    unknown = sorted(set(quantized) - set(names.values()))
    if unknown:
        raise UsageError(f"no layer {unknown[0]!r} in this model; name nn.Linear and nn.Conv2d layers of it")
    found: list[Product] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        name, on_grid = names[module], isinstance(module, QuantLayer)
        shape: tuple[int, ...] = module.float_shape if on_grid else module.weight.shape  # type: ignore[assignment]
        outputs, size = shape[0], math.prod(shape)
        found.append(Product(name, y.numel() // outputs * size, on_grid or name in quantized, error=inputs[0].requires_grad))

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counted:
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    rest = counted.get_total_flops() // 2 - sum(product.macs for product in found)
    return [*found, Product("attention", rest, weights=False)] if rest else found


def mac_pj(precision: str, node: str = "7nm") -> float:
    """One multiply-add of a product: fp16 and bf16 sum up in FP32, int8 in INT32, as tensor cores do."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    multiply, add = PRECISIONS[precision]
    costs = operations(node)
    return costs[multiply].multiply + costs[add].add


def orthogonalize_j(shapes: Iterable[tuple[int, int]],  # (out, in) of the integer layers
                      node: str = "7nm") -> float:
    """Joules that orthogonalizing the votes adds to one optimizer step: its products, in bf16 as on a GPU."""
    return mac_pj("bf16", node) * PICOJOULE * sum(newton_schulz_multiply_adds(*shape) for shape in shapes)


# What renewing a running mean takes a weight in float32 (ops/momentum.py): the mean, once for its largest entries and once
# to keep it, rounding it, and what it moves by.
MOMENTUM = {"multiply": 9, "add": 3}


def rule_extras_j(integers: Integers, shapes: Iterable[tuple[int, int]], node: str = "7nm") -> float:
    """Joules that settings of a rule add to one optimizer step: running means of votes, and products of whole matrices."""
    shapes, fp32 = list(shapes), operations(node)["fp32"]
    joules = orthogonalize_j(shapes, node) if integers.orthogonalize else 0.0
    if integers.momentum:
        weights = sum(out * features for out, features in shapes)
        joules += (MOMENTUM["multiply"] * fp32.multiply + MOMENTUM["add"] * fp32.add) * PICOJOULE * weights
    macs = sum(lowrank.multiply_adds(*shape, integers.momentum_rank) for shape in shapes) if integers.momentum_rank else 0
    return joules + mac_pj("fp32", node) * PICOJOULE * macs


def step_energy(products: Sequence[Product], fp32_params: int, quantized_params: int, bits: int, precision: str = "fp32",
                node: str = "7nm", moved: float | None = None) -> Joules:
    """Joules of one whole training step: the products, and the optimizer step as the paper estimates it.

    precision: of the products with floats, those with integer weights included: levels are multiplied as floats on the
        chips there are. Votes are int8 whatever it is.
    """
    mac, vote = (mac_pj(kind, node) * PICOJOULE for kind in (precision, "int8"))
    forward = mac * sum(product.macs for product in products)
    # A product of two activations has two errors; one with weights has one, and a gradient or votes.
    error = mac * sum(product.macs * (2 if not product.weights else int(product.error)) for product in products)
    weight = sum(product.macs * (vote if product.quantized else mac) for product in products if product.weights)
    return Joules(forward, error, weight, energy_estimate_j(fp32_params, quantized_params, bits, 1, node, moved))
