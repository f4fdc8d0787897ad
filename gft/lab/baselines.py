"""Baselines: other ways to train weights on the same grid, in the same loop, so that they can be compared with gft.

Each keeps the forward pass of gft (scale · levels, the scale a · std of the float layer, fixed) and starts from the same
levels. They differ in what they keep of a weight and in how it moves; g is the gradient by the forward weight:

    ste      a float latent w, w <- AdamW(w, g), forward on clip(round(w / scale)) · scale: quantization-aware training with
             the straight-through estimator (Bengio et al. 2013); g counts where w rounds to a level of the grid, else 0
    signsgd  level <- level - sign(votes) with chance lr: signSGD with majority vote (Bernstein et al. 2018). The batch is
             split among 8 voters, each casts the sign of its own g
    bop      m <- m + lr · (g - m); level <- level - sign(m) where |m| > threshold · rms(m): momentum flips ("Latent
             weights do not exist", Helwegen et al. 2019), from two levels to many
    dqt      level <- stochastic_round(level - AdamW's move / scale), no latent: "Direct Quantized Training" (Zhao et al.
             2024)

All levels stay within -I..I. A level is an int8, so it has no autograd gradient: LevelLinear gathers g, or the votes, in
its own backward pass, and the optimizers below read it there. Random numbers are Philox's (philox.py), a function of
(seed, step, layer): a run resumes from its step alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gft
from gft.errors import UsageError
from gft.initialize import levels_of, scale_of
from gft.layers import quantized_layers
from gft.philox import NoiseKey, noise16
from gft.storage import largest_level

METHODS = ("ste", "signsgd", "bop", "dqt")
VOTERS = 8  # of a batch, for signsgd
THRESHOLD = 2.0  # of bop, in rms of m

# ---------------------------------------------------------------------------------------------------- the maths


def straight_through(latent: Tensor,  # (out, in) float
                     scale: Tensor,
                     bits: int) -> Tensor:  # (out, in) float, on the grid
    """clip(round(latent / scale), -I, I) · scale. Its gradient passes unchanged where latent rounds to a level of the
    grid, |latent| <= (I + 1/2) · scale, and is 0 beyond. torch's own fake quantization, so that nobody need trust ours."""
    zero = torch.zeros((), dtype=torch.int32, device=latent.device)
    return torch.fake_quantize_per_tensor_affine(latent, scale, zero, -largest_level(bits), largest_level(bits))


def sign_votes(x: Tensor,  # (n, in)
               delta: Tensor,  # (n, out)
               voters: int) -> Tensor:  # (out, in) int8
    """Split the n rows among the voters; each casts the sign of its own gradient."""
    votes = torch.zeros(delta.shape[1], x.shape[1], dtype=torch.int8, device=x.device)
    for some_x, some_delta in zip(x.tensor_split(voters), delta.tensor_split(voters), strict=True):
        votes += (some_delta.t() @ some_x).sign().to(torch.int8)
    return votes


def majority_moves(votes: Tensor,  # (out, in)
                   chance: float,
                   noise: Tensor) -> Tensor:  # numbers 0..65535 -> (out, in)
    """How levels move in signSGD: by the sign of the majority, with a chance; a tie stays. A sign has no size, so the chance
    is all there is of a learning rate."""
    return torch.where(noise.view_as(votes) < chance * 65536, votes.sign(), 0)


def momentum_moves(average: Tensor,  # (out, in) float: m
                   threshold: float) -> Tensor:  # (out, in)
    """How levels move in Bop: by sign(m) where |m| exceeds `threshold` rms of the layer's m. Relative, so that one threshold
    serves every layer; Helwegen et al. have an absolute one."""
    return torch.where(average.abs() > threshold * average.square().mean().sqrt(), average.sign(), 0)


def adam_direction(gradient: Tensor, first: Tensor, second: Tensor, step: int, beta1: float, beta2: float,
                   eps: float = 1e-8) -> Tensor:
    """Adam's move at lr 1 in step 1, 2, …; renews both moments in place."""
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    return first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)


def stochastic_round(values: Tensor, noise: Tensor) -> Tensor:
    """Round up or down to an integer, with the probabilities that make the expectation right, to 1/65536."""
    # First to the resolution of the noise, where 0 is as far from up as from down: later moves are tiny.
    fixed = (values * 65536).round().to(torch.int32)
    return (fixed + noise.view_as(fixed)) >> 16


# ---------------------------------------------------------------------------------------------------- layers


class GridLinear(nn.Module):
    """A linear layer without bias whose forward weight lies on the grid of `bits` bits: scale · levels."""

    weight: nn.Parameter
    scale: Tensor

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scale", scale_of(linear.weight, bits))

    def levels(self) -> Tensor:
        """(out, in) int8, as the forward pass uses them."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class LatentLinear(GridLinear):
    """The forward weight is a float latent rounded to the grid; its gradient goes straight through to the latent."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__(linear, bits)
        edge = largest_level(bits) * self.scale
        # A weight beyond the grid would never get a gradient. At its edge it has the same level and gets one.
        self.weight = nn.Parameter(linear.weight.detach().clamp(-edge, edge))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, straight_through(self.weight, self.scale, self.bits))

    def levels(self) -> Tensor:
        return (straight_through(self.weight.detach(), self.scale, self.bits) / self.scale).round().to(torch.int8)


class _LevelProduct(torch.autograd.Function):
    """scale · x · levels^T; backward hands x and delta to the layer, which gathers what its optimizer wants of them.

    `anchor` is an empty tensor that requires grad: it makes backward run although int8 weights cannot ask for one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: "LevelLinear") -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        ctx.layer, ctx.x_dtype = layer, x.dtype
        ctx.save_for_backward(x.to(dtype))
        return F.linear(x.to(dtype), layer.float_weight(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,), (x,) = grads, ctx.saved_tensors
        layer: LevelLinear = ctx.layer
        layer.gather(x.reshape(-1, layer.in_features), delta.reshape(-1, layer.out_features))
        needed = ctx.needs_input_grad[0]
        return (delta @ layer.float_weight(delta.dtype)).to(ctx.x_dtype) if needed else None, None, None


class LevelLinear(GridLinear):
    """The weight is its levels, int8, and nothing else.

    `gradient` is what backward gathered since zero_grad: the float32 gradient by the forward weight, or with voters the
    int8 sum of their signs (room for 15 backward passes of 8 voters).
    """

    def __init__(self, linear: nn.Linear, bits: int, voters: int = 0) -> None:
        super().__init__(linear, bits)
        self.weight = nn.Parameter(levels_of(linear.weight, bits)[0], requires_grad=False)
        self.voters = voters
        self.gradient: Tensor | None = None
        self._anchor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._anchor is None or self._anchor.device != x.device:
            self._anchor = torch.empty(0, device=x.device, requires_grad=True)
        return _LevelProduct.apply(x, self._anchor, self)  # type: ignore[no-any-return]

    def gather(self, x: Tensor, delta: Tensor) -> None:
        new = sign_votes(x, delta, self.voters) if self.voters else (delta.t() @ x).float()
        self.gradient = new if self.gradient is None else self.gradient + new

    def float_weight(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype)

    def levels(self) -> Tensor:
        return self.weight.detach()


def put_on_grid_(model: nn.Module, bits: int, filter_fn: Callable[[nn.Module, str], bool], method: str) -> nn.Module:
    """Replace the chosen nn.Linear layers by the method's, in place: gft.quantize_ of the baselines. Biases are left out."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen = {name: linear for name, linear in linears.items() if filter_fn(linear, name)}
    if not chosen:
        raise UsageError(f"no layer to quantize for method={method}: this model has no nn.Linear of that kind")
    for name, linear in chosen.items():
        layer = LatentLinear(linear, bits) if method == "ste" else LevelLinear(linear, bits, VOTERS * (method == "signsgd"))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model


def grid_layers(model: nn.Module) -> list[GridLinear]:
    return [module for module in model.modules() if isinstance(module, GridLinear)]


def dense(model: nn.Module) -> list[nn.Parameter]:
    """gft.dense without the latents: what the rest of the network learns by AdamW."""
    latents = {id(layer.weight) for layer in grid_layers(model)}
    return [parameter for parameter in gft.dense(model) if id(parameter) not in latents]


# ---------------------------------------------------------------------------------------------------- optimizers


class LevelOptimizer(Optimizer):
    """What the optimizers of LevelLinear share: each turns what a layer gathered into `moves`, in levels."""

    def __init__(self, layers: Iterable[LevelLinear], lr: float, seed: int = 0, **settings: Any) -> None:
        if not 0 <= lr <= 1:
            raise UsageError(f"lr={lr}: give a number from 0 to 1")
        self.layers = list(layers)
        super().__init__([layer.weight for layer in self.layers], {"lr": lr, "seed": seed, "step": 0, **settings})

    def moves(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any],
              noise: Callable[[], Tensor]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """level <- clip(level - moves, -I, I)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        for place, layer in enumerate(self.layers):
            if layer.gradient is None:
                continue
            weight, state = layer.weight, self.state[layer.weight]

            def noise(weight: Tensor = weight, place: int = place) -> Tensor:
                return noise16(weight.numel(), NoiseKey(group["seed"], group["step"], place), device=weight.device)

            largest = largest_level(layer.bits)
            moves = self.moves(layer, layer.gradient, state, group, noise)
            new = (weight.to(torch.int16) - moves).clamp(-largest, largest).to(torch.int8)  # 127 + 1 is no int8
            flips = (new != weight).sum()
            state["flips"] = state["flips"] + flips if "flips" in state else flips
            weight.copy_(new)
        group["step"] += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for layer in self.layers:
            layer.gradient = None

    def flips(self) -> int:
        """How many times a weight changed its level since the start."""
        return sum(int(state["flips"]) for state in self.state.values() if "flips" in state)


class SignSGD(LevelOptimizer):
    """signSGD with majority vote: levels move by the sign of the voters' majority, each with a chance.

    lr: that chance. At 0 nothing moves; at 1 every weight moves in every step and training never settles. No state."""

    def moves(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any],
              noise: Callable[[], Tensor]) -> Tensor:
        return majority_moves(gradient, group["lr"], noise())


class Bop(LevelOptimizer):
    """Bop: a level moves where the momentum m of its gradient exceeds a threshold.

    lr: how fast m follows the gradient (the paper's gamma, which it lets fall, too). At 0 m stands still and the same
    weights move until they are at the edge; at 1 there is no memory and single gradients move weights.
    threshold: how many rms |m| must exceed. At 0 every weight moves in every step; beyond 10 or so none ever does.

    m goes on when its weight has moved, as in the paper. State: m, float32."""

    def __init__(self, layers: Iterable[LevelLinear], lr: float, threshold: float = THRESHOLD, seed: int = 0) -> None:
        super().__init__(layers, lr, seed, threshold=threshold)

    def moves(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any],
              noise: Callable[[], Tensor]) -> Tensor:
        if "m" not in state:
            state["m"] = torch.zeros_like(gradient)
        return momentum_moves(state["m"].lerp_(gradient, group["lr"]), group["threshold"])


class DQT(LevelOptimizer):
    """Direct quantized training: AdamW's update of a level, stochastically rounded.

    lr: AdamW's, in units of the forward weight. At 0 nothing moves; where lr nears the scale, a level or more a step,
    training never settles. State: two moments, float32."""

    def __init__(self, layers: Iterable[LevelLinear], lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 seed: int = 0) -> None:
        super().__init__(layers, lr, seed, betas=betas)

    def moves(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any],
              noise: Callable[[], Tensor]) -> Tensor:
        if "first" not in state:
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        direction = adam_direction(gradient, state["first"], state["second"], group["step"] + 1, *group["betas"])
        return stochastic_round(group["lr"] * direction / layer.scale, noise())


def make_optimizer(method: str, model: nn.Module, lr: float, beta2: float, threshold: float, seed: int) -> Optimizer:
    """The optimizer of a model's GridLinear layers."""
    layers = grid_layers(model)
    if method == "ste":
        # No weight decay: the scale is fixed, and a latent near 0 is a weight of 0.
        return torch.optim.AdamW([layer.weight for layer in layers], lr=lr, betas=(0.9, beta2), weight_decay=0.0)
    levels = [layer for layer in layers if isinstance(layer, LevelLinear)]
    if method == "signsgd":
        return SignSGD(levels, lr, seed)
    return Bop(levels, lr, threshold, seed) if method == "bop" else DQT(levels, lr, (0.9, beta2), seed)


# ---------------------------------------------------------------------------------------------------- bytes


def weights_on_grid(model: nn.Module) -> int:
    """How many weights gft or a baseline keeps on a grid."""
    return (sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
            + sum(layer.in_features * layer.out_features for layer in grid_layers(model)))


def training_bytes(model: nn.Module, optimizer: Optimizer) -> float:
    """Bytes that training holds for one weight: the weight, its gradient or votes, and the optimizer's state, measured.

    Call it between backward and step. Of a model with layers on a grid, whatever trains them, it is the mean over the
    weights of those layers; of any other, over all trainable parameters. Activations are not counted, nor what lives
    within one layer's pass alone, such as levels made float for a product.
    """
    held: list[Any] = [[layer.qweight, layer.votes and vars(layer.votes)] for layer in quantized_layers(model).values()]
    held += [[layer.weight, getattr(layer, "gradient", None)] for layer in grid_layers(model)]
    held = held or [[parameter] for parameter in gft.dense(model)]
    weights = [one[0] for one in held]
    held += [[weight.grad, optimizer.state.get(weight)] for weight in weights]
    # By identity: an optimizer's state and a layer's votes may hold the same tensor.
    tensors = {id(tensor): tensor for tensor in tensors_in(held)}.values()
    count = weights_on_grid(model) or sum(weight.numel() for weight in weights)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / count


def training_bytes_after_step(model: nn.Module, optimizer: Optimizer) -> float:
    """`training_bytes` after a step. Gradients stay until zero_grad, but GFT's votes are spent: an empty sample through
    each of its layers has them cast again, to be measured and thrown away."""
    for layer in quantized_layers(model).values():
        layer(torch.zeros(1, layer.inputs, device=layer.qweight.device)).sum().backward()
    measured = training_bytes(model, optimizer)
    optimizer.zero_grad()
    return measured


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in a nest of lists and dicts."""
    if hasattr(values, "__tensor_flatten__"):  # a tensor made of others
        values = [getattr(values, name) for name in values.__tensor_flatten__()[0]]
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple, Mapping)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(value)
