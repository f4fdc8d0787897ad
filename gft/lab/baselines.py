"""Baselines: other ways to train weights on the same grid, in the same loop, so that they can be compared with gft.

Each but bitnet keeps the forward pass of gft (scale · levels, the scale a · std of the float layer, fixed) and starts from
the same levels. They differ in what they keep of a weight and in how it moves; g is the gradient by the forward weight:

    ste      a float latent w, w <- AdamW(w, g), forward on clip(round(w / scale)) · scale: quantization-aware training with
             the straight-through estimator (Bengio et al. 2013); g counts where w rounds to a level of the grid, else 0
    signsgd  level <- level - sign(votes) with chance lr: signSGD with majority vote (Bernstein et al. 2018). The batch is
             split among 8 voters, each casts the sign of its own g
    bop      m <- m + lr · (g - m); level <- level - sign(m) where |m| > threshold · rms(m): momentum flips ("Latent
             weights do not exist", Helwegen et al. 2019), from two levels to many
    dqt      level <- stochastic_round(level - AdamW's move / scale), no latent: "Direct Quantized Training" (Zhao et al.
             2024)
    eco      as dqt, but what the rounding of a level left over goes into Adam's first moment, so that the moves to come make
             up for it: ECO (Nikdan et al. 2026)
    bitnet   a float latent w, forward on clip(round(w / mean|w|)) · mean|w|, renewed with every w, and on inputs that are
             normalised and rounded to 8 bits a token: BitNet b1.58 (Ma et al. 2024), by the straight-through estimator. At
             more than 2 bits the scale is the one that suits a Gaussian of w's rms

All levels stay within -I..I. A level is an int8, so it has no autograd gradient: LevelLinear gathers g, or the votes, in
its own backward pass, and the optimizers below read it there. Random numbers are Philox's (philox.py), a function of
(seed, step, layer): a run resumes from its step alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gft
from gft import ops
from gft.errors import UsageError
from gft.initialize import SPACING, levels_of, scale_of
from gft.layers import quantized_layers
from gft.philox import NoiseKey
from gft.storage import largest_level

METHODS = ("ste", "signsgd", "bop", "dqt", "eco", "bitnet")
VOTERS = 8  # of a batch, for signsgd
THRESHOLD = 2.0  # of bop, in rms of m
EPS = 1e-8  # of Adam
LEAST_LR = 1e-12  # by which ECO divides

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


def adam_direction(gradient: Tensor, first: Tensor, second: Tensor, step: int | Tensor, beta1: float, beta2: float,
                   ) -> tuple[Tensor, Tensor]:
    """Adam's move at lr 1 in step 1, 2, …, and what it was divided by; renews both moments in place."""
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    divisor = ((second / (1 - beta2**step)).sqrt() + EPS) * (1 - beta1**step)
    return first / divisor, divisor


def compensation(lost: Tensor, divisor: Tensor, lr: float | Tensor, beta1: float) -> Tensor:
    """What ECO adds to Adam's first moment so that the moves to come make up for a rounding that was off by `lost`.

    A moment changed by d moves the weight by -lr · d · (beta1 + beta1² + …) / divisor more in all, if lr and the divisor
    stay; that is `lost` for d = (1 - 1/beta1) · lost · divisor / lr.
    """
    return (1 - 1 / beta1) * lost * divisor / lr


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


class BitLinear(GridLinear):
    """BitNet b1.58's: a float latent, rounded on the scale of its own mean size; inputs normalised and rounded to 8 bits."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__(linear, bits)
        del self.scale  # it follows from the latent
        self.weight = nn.Parameter(linear.weight.detach().clone())

    def on_grid(self) -> tuple[Tensor, Tensor]:
        """Levels, as floats, and their scale."""
        latent, largest = self.weight.detach(), largest_level(self.bits)
        scale = latent.abs().mean() if self.bits == 2 else SPACING[self.bits] * latent.square().mean().sqrt()
        scale = scale.clamp_min(1e-5)
        return (latent / scale).round_().clamp_(-largest, largest), scale

    def forward(self, x: Tensor) -> Tensor:
        levels, scale = self.on_grid()
        x = F.rms_norm(x.float(), (self.in_features,))
        step = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        # a + (b - a).detach() is b, with the gradient of a.
        x = x + ((x / step).round_() * step - x).detach()
        return F.linear(x, self.weight + (levels * scale - self.weight).detach())

    def levels(self) -> Tensor:
        return self.on_grid()[0].to(torch.int8)


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

    @torch.compiler.disable  # backward writes to the layer, which no graph can
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
        kinds: dict[str, Callable[[nn.Linear, int], GridLinear]] = {"ste": LatentLinear, "bitnet": BitLinear}
        layer = (kinds[method](linear, bits) if method in kinds
                 else LevelLinear(linear, bits, VOTERS * (method == "signsgd")))
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
    """What the optimizers of LevelLinear share: each turns what a layer gathered into `moves`, in levels.

    All that changes from step to step is kept where the weights are, the count of steps too, and renewed in place: a step
    can be captured as a CUDA graph (gft.Captured)."""

    def __init__(self, layers: Iterable[LevelLinear], lr: float, seed: int = 0, **settings: Any) -> None:
        if not 0 <= lr <= 1:
            raise UsageError(f"lr={lr}: give a number from 0 to 1")
        self.layers = list(layers)
        super().__init__([layer.weight for layer in self.layers], {"lr": lr, "seed": seed, "step": 0,
                                                                  "capturable": True, **settings})

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
        device = self.layers[0].weight.device
        if device.type == "cuda" and not (isinstance(group["step"], Tensor) and group["step"].device == device):
            group["step"] = torch.tensor(int(group["step"]), device=device)
        for place, layer in enumerate(self.layers):
            if layer.gradient is None:
                continue
            weight, state = layer.weight, self.state[layer.weight]

            def noise(weight: Tensor = weight, place: int = place) -> Tensor:
                numbers = torch.empty(weight.numel(), dtype=torch.int32, device=weight.device)
                return ops.draw_noise(numbers, NoiseKey(group["seed"], group["step"], place))

            largest = largest_level(layer.bits)
            moves = self.moves(layer, layer.gradient, state, group, noise)
            new = (weight.to(torch.int16) - moves).clamp(-largest, largest).to(torch.int8)  # 127 + 1 is no int8
            if "flips" not in state:
                state["flips"] = torch.zeros((), dtype=torch.int64, device=weight.device)
            state["flips"] += (new != weight).sum()
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
        return stochastic_round(self.wanted(layer, gradient, state, group)[0], noise())

    def wanted(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any],
               group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """AdamW's move in levels, before it is rounded, and what it was divided by."""
        if "first" not in state:
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        direction, divisor = adam_direction(gradient, state["first"], state["second"], group["step"] + 1, *group["betas"])
        return group["lr"] * direction / layer.scale, divisor


class ECO(DQT):
    """DQT with error feedback: what a level's rounding leaves over is put into the first moment, which hands it to the moves
    to come. Nothing more is kept than DQT keeps.

    lr: AdamW's, in units of the forward weight. State: two moments, float32."""

    def moves(self, layer: LevelLinear, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any],
              noise: Callable[[], Tensor]) -> Tensor:
        wanted, divisor = self.wanted(layer, gradient, state, group)
        largest = largest_level(layer.bits)
        # What would leave the grid is no error of the rounding: fed back it would only grow.
        wanted = layer.weight - (layer.weight - wanted).clamp(-largest, largest)
        moves = stochastic_round(wanted, noise())
        lost = (moves - wanted) * layer.scale  # the weight is where it should be, less this
        lr = group["lr"].clamp_min(LEAST_LR) if isinstance(group["lr"], Tensor) else max(group["lr"], LEAST_LR)
        state["first"] += compensation(lost, divisor, lr, group["betas"][0])
        return moves


@dataclass(frozen=True)
class Method:
    """Which method, and its settings."""

    name: str
    lr: float
    beta2: float = 0.999
    weight_decay: float = 0.0  # bitnet: of its latents; the others have none, for their scale is fixed
    threshold: float = THRESHOLD  # bop
    seed: int = 0


def make_optimizer(method: Method, model: nn.Module) -> Optimizer:
    """The optimizer of a model's GridLinear layers."""
    layers, lr, betas = grid_layers(model), method.lr, (0.9, method.beta2)
    if method.name in ("ste", "bitnet"):
        # No weight decay for ste: the scale is fixed, and a latent near 0 is a weight of 0.
        latents, on_gpu = [layer.weight for layer in layers], layers[0].weight.is_cuda
        return torch.optim.AdamW(latents, lr=lr, betas=betas, fused=on_gpu, capturable=on_gpu,
                                 weight_decay=method.weight_decay if method.name == "bitnet" else 0.0)
    levels = [layer for layer in layers if isinstance(layer, LevelLinear)]
    if method.name == "signsgd":
        return SignSGD(levels, lr, method.seed)
    if method.name == "bop":
        return Bop(levels, lr, method.threshold, method.seed)
    return (ECO if method.name == "eco" else DQT)(levels, lr, betas, method.seed)


# ---------------------------------------------------------------------------------------------------- bytes


def weights_on_grid(model: nn.Module) -> int:
    """How many weights gft or a baseline keeps on a grid."""
    return (sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
            + sum(layer.in_features * layer.out_features for layer in grid_layers(model)))


def training_bytes(model: nn.Module, optimizer: Optimizer, gradients: bool = True) -> float:
    """Bytes that training holds for one weight: the weight, its gradient or votes, and the optimizer's state, measured.

    gradients: False leaves out the gradient or votes, which need not be kept from one step to the next.

    Call it between backward and step. Of a model with layers on a grid, whatever trains them, it is the mean over the
    weights of those layers; of any other, over the matrices of its blocks, or all trainable parameters. Activations
    are not counted, nor what lives within one layer's pass alone, such as levels made float for a product.
    """
    votes = [vars(layer.votes) for layer in quantized_layers(model).values() if layer.votes]
    if not gradients:
        votes = [{key: value for key, value in one.items() if key != "votes"} for one in votes]
    weights = [layer.qweight for layer in quantized_layers(model).values()] + [layer.weight for layer in grid_layers(model)]
    blocks = [weight for name, weight in model.named_parameters() if name.startswith("blocks.") and weight.dim() > 1]
    weights = weights or blocks or gft.dense(model)
    held = [weights, votes, [optimizer.state.get(weight) for weight in weights]]
    if gradients:
        held += [[weight.grad for weight in weights], [getattr(layer, "gradient", None) for layer in grid_layers(model)]]
    # By identity: an optimizer's state and a layer's votes may hold the same tensor.
    tensors = {id(tensor): tensor for tensor in tensors_in(held)}.values()
    count = weights_on_grid(model) or sum(weight.numel() for weight in weights)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / count


def training_bytes_after_step(model: nn.Module, optimizer: Optimizer) -> tuple[float, float]:
    """`training_bytes` after a step, with and without gradients or votes. Gradients stay until zero_grad, but GFT's votes
    are spent: an empty sample through each of its layers has them cast again, to be measured and thrown away."""
    for layer in quantized_layers(model).values():
        places = getattr(layer, "kernel_size", ())  # of a convolution
        layer(torch.zeros(1, layer.inputs, *places, device=layer.qweight.device)).sum().backward()
    measured = training_bytes(model, optimizer), training_bytes(model, optimizer, gradients=False)
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
