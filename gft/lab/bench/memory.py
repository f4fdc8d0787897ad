"""How many bytes training takes: of each weight, and of each activation. Measured, not computed.

A weight's bytes are a difference of two peaks: a stack of layers is trained at two depths, and what the deeper one takes
more, divided by the weights it has more, is what a weight costs whatever else there is. What is left of the peak is scratch,
which does not grow with depth: one layer's levels made float for a product and, as it moves inside backward, its votes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gft
from gft import ops
from gft.lab.bench.rows import Row, allocated, forget_peak, peak, say, stored, wait
from gft.layers import quantized_layers
from gft.votes import Int4, Int8, Sign, Ternary

STEPS = 3
TOKENS = 32  # so few that activations come to next to nothing beside weights
NO_TORCHAO = "not installed; pip install torchao"
Stack = tuple[nn.Sequential, torch.optim.Optimizer]


def memory(device: torch.device, small: bool = False) -> Iterator[Row]:
    """Bytes a weight in training, and bytes an input element kept for backward."""
    yield from weights(device, small)
    yield from saved(device, small)


# ---------------------------------------------------------------------------------------------------- a weight


@dataclass(frozen=True)
class Bytes:
    a_weight: float
    scratch: float | None  # that does not grow with depth; a CPU's peak is not known


def measure(build: Callable[[int], Stack],  # of a depth
            width: int, device: torch.device, dtype: torch.dtype) -> Bytes:
    """What a few training steps take."""
    if device.type != "cuda":
        model, optimizer = build(2)
        train(model, optimizer, width, device, dtype, steps=STEPS)
        backward(model, optimizer, width, device, dtype)
        return Bytes(counted(model, optimizer) / (2 * width**2), None)
    shallow, deep = 2, 6
    _peak(build, shallow, width, device, dtype)  # for the kernels' compilation and the products' workspaces, which stay
    least, most = (_peak(build, depth, width, device, dtype) for depth in (shallow, deep))
    a_weight = (most - least) / ((deep - shallow) * width**2)
    return Bytes(a_weight, least - a_weight * shallow * width**2)


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the weights, and of what is held of them between backward and step: gradients or votes, and state."""
    weights = list(model.parameters())
    votes = [layer.votes and vars(layer.votes) for layer in quantized_layers(model).values()]
    return stored([weights, [weight.grad for weight in weights], votes, list(optimizer.state.values())])


def _peak(build: Callable[[int], Stack], depth: int, width: int, device: torch.device, dtype: torch.dtype) -> int:
    forget_peak(device)
    before = allocated(device)
    model, optimizer = build(depth)
    forget_peak(device)  # building draws floats
    train(model, optimizer, width, device, dtype, steps=STEPS)
    wait(device)
    return peak(device) - before


def backward(model: nn.Sequential, optimizer: torch.optim.Optimizer, width: int, device: torch.device,
             dtype: torch.dtype) -> None:
    """As far as the step, which a CPU's count must precede: it holds gradients, or votes, until then."""
    loss = model(torch.randn(TOKENS, width, device=device, dtype=dtype)).float().square().mean()
    optimizer.zero_grad(); loss.backward()


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, width: int, device: torch.device, dtype: torch.dtype,
          steps: int) -> None:
    for _ in range(steps):
        backward(model, optimizer, width, device, dtype)
        optimizer.step()


def _linear(width: int, depth: int, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(depth)))


def weights(device: torch.device, small: bool = False) -> Iterator[Row]:
    """Bytes a weight of wide linear layers, beside AdamW in fp32 and, where it is installed, 8-bit AdamW on bf16 weights."""
    width = 64 if small else 8192 if device.type == "cuda" else 1024
    float32, half = torch.float32, torch.bfloat16

    def ours(bits: int, with_memory: bool, rule: gft.Rounding) -> Callable[[int], Stack]:
        def build(depth: int) -> Stack:
            model = nn.Sequential(*(gft.QuantLinear(width, width, bits, memory=with_memory, device=device)
                                    for _ in range(depth)))
            return model, gft.GFT(gft.quantized(model), rule=rule, in_backward=True)

        return build

    def adamw(depth: int) -> Stack:
        model = _linear(width, depth, device, float32)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def adamw8(depth: int) -> Stack:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

        model = _linear(width, depth, device, half)
        return model, AdamW8bit(model.parameters(), bf16_stochastic_round=True)

    peers = {"AdamW fp32": measure(adamw, width, device, float32).a_weight}
    say(f"  AdamW fp32: {peers['AdamW fp32']:.3f} B a weight")
    try:
        peers["AdamW8bit, bf16 weights"] = measure(adamw8, width, device, half).a_weight
    except ImportError:
        nothing = float("nan")
        yield Row("memory", "a weight, torchao's AdamW8bit as a peer", nothing, nothing, "B", NO_TORCHAO, nothing,
                  "not measured", False)
    how = "peak" if device.type == "cuda" else "counted"
    dtype = half if device.type == "cuda" else float32
    plain, mean = gft.Rounding(), gft.Rounding(momentum=0.9)
    forms = {"2 bit, packed": (ours(2, False, plain), 0.30), "4 bit, packed": (ours(4, False, plain), 0.55),
             "4 bit, with memory": (ours(4, True, plain), 1.05),
             "4 bit, with memory and momentum": (ours(4, True, mean), 2.05)}
    for form, (network, bar) in forms.items():
        took = measure(network, width, device, dtype)
        say(f"  {form}: {took.a_weight:.3f} B a weight")
        for name, peer in peers.items():
            yield Row("memory", f"a weight, {form}, layers of {width}×{width}, {how}", took.a_weight, peer, "B", name,
                      took.a_weight / peer, f"ours at most {bar:.2f}", took.a_weight <= bar)
        if took.scratch is not None:
            stated = 6 * width**2
            yield Row("memory", f"scratch, {form}, a layer of {width}×{width}", took.scratch / 1e6, stated / 1e6, "MB",
                      "its bf16 levels and int32 votes", took.scratch / stated, "at most 1.1", took.scratch <= 1.1 * stated)


# ---------------------------------------------------------------------------------------------------- an activation


def bytes_saved(layer: nn.Module, x: Tensor) -> int:
    """What a layer's graph keeps for backward, its own parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return stored(kept)


def saved(device: torch.device, small: bool = False) -> Iterator[Row]:
    """Bytes an element of x that a layer keeps, by kind of vote, beside a bf16 linear layer."""
    tokens, width = (64, 32) if small else (4096, 4096)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
    peer = bytes_saved(linear, x) / x.numel()
    for name, vote in (("sign", Sign()), ("ternary", Ternary()), ("int4", Int4()), ("int8", Int8())):
        layer = gft.QuantLinear(width, width, 2, memory=False, device=device)
        optimizer = gft.GFT(gft.quantized(layer), vote=vote)
        ours, bar = bytes_saved(layer, x), vote.bits / 8
        del optimizer  # which the votes belong to
        # Sums of the features' squares go with x: 4 B a feature, on a GPU for each 64 tokens.
        yield Row("memory", f"an element of x kept for backward, votes {name}", ours / x.numel(), peer, "B",
                  "nn.Linear bf16", ours / x.numel() / peer, f"ours at most {bar:g} and 4 B a feature and run of tokens",
                  ours <= bar * x.numel() + 4 * width * ops.runs_of(x, tokens))
