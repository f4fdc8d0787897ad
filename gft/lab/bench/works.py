"""What is trained in a benchmark: networks, how they are fed, and how fast a step of each should be beside AdamW's.

    the paper's networks    DNN, nanoGPT, ViT: a step captured as one CUDA graph
    Hugging Face's Llama    as its Trainer runs it, from eager to captured, and by momentum; wide ones in low precision, too
    ResNets                 convolutions, channels_last

`small` makes tiny networks of the same kinds, to see on a CPU that they run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gft.lab.models import DNN, GPT, ResNet, ViT
from gft.lab.models.resnet import Bottleneck, large_image_stem

Batch = tuple[Tensor, Tensor]


def loss_of_logits(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of a model that returns logits, outside of it as most loops take it."""
    return F.cross_entropy(model(x).float().flatten(0, -2), y.flatten())


def own_loss(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """That of a transformers model, which it returns where it gets the labels: so its Trainer calls it."""
    return model(input_ids=x, labels=y).loss  # type: ignore[attr-defined]


def in_blocks(module: nn.Module, name: str) -> bool:
    return name.startswith("blocks.")


class Ours(NamedTuple):
    """How a network's integers are trained."""

    bits: int
    compute: str | None = None  # gft.quantize_'s; None: as autocast says
    momentum: bool = False  # do they follow Muon's update of their votes, not the default rule?

    def __str__(self) -> str:
        return f"{self.bits} bit" + f" {self.compute}" * bool(self.compute) + " momentum" * self.momentum


@dataclass(frozen=True)
class Work:
    """A network and what it is fed."""

    name: str
    build: Callable[[], nn.Module]
    filter_fn: Callable[[nn.Module, str], bool]  # which layers become integers
    batch: Callable[[torch.device], Batch]
    bars: Mapping[str, float]  # ways of running a step (steps.WAYS) -> at most so much of AdamW's time, both in bf16
    loss: Callable[..., Tensor] = loss_of_logits
    bits: tuple[int, ...] = (2, 4)
    bias: bool = True  # False: the paper's layers, without biases and gains
    fp32_bar: float | None = None  # captured, of AdamW's time in float32
    peak_bar: float | None = None  # eager, of AdamW's peak memory
    more: tuple[Ours, ...] = ()  # networks of ours beside those of `bits`
    low_bar: float = 0.75  # of those in low precision, of AdamW's time in bf16
    float8_bar: float = 1.0  # of AdamW's with torchao's float8 products, where torchao is installed
    muon_bar: float = 1.0  # of those with momentum, of Muon's
    needs: str = ""  # a package that gft can do without

    @property
    def ours(self) -> tuple[Ours, ...]:
        return (*map(Ours, self.bits), *self.more)


# ---------------------------------------------------------------------------------------------------- the paper's


def dnn(width: int, depth: int, batch: int, bits: tuple[int, ...] = (2,)) -> Work:
    return Work(f"DNN {depth}×{width}, batch {batch}", lambda: DNN(784, 10, width, depth), lambda module, name: True,
                lambda device: (torch.randn(batch, 784, device=device), torch.randint(10, (batch,), device=device)),
                {"captured": 1.0}, bits=bits, bias=False, fp32_bar=0.6)


def of_the_paper(small: bool) -> list[Work]:
    context, wide, deep, sequences, images = (16, 32, 2, 2, 2) if small else (256, 384, 6, 128, 256)

    def characters(device: torch.device) -> Batch:
        x = torch.randint(65, (sequences, context), device=device)
        return x, x

    def pictures(device: torch.device) -> Batch:
        return torch.randn(images, 1, 28, 28, device=device), torch.randint(10, (images,), device=device)

    return [
        *([dnn(64, 2, 256)] if small else [dnn(4096, 5, 256), dnn(4096, 5, 8192)]),
        Work("nanoGPT, Hybrid-2", lambda: GPT(65, context, wide, deep, deep), in_blocks, characters, {"captured": 1.0},
             bits=(2,), bias=False),
        Work("ViT 28×28, Hybrid-2",
             lambda: ViT((1, 28, 28), 10, 4, 32 if small else 512, 2 if small else 12, 2 if small else 8), in_blocks,
             pictures, {"captured": 1.0}, bits=(2,), bias=False),
    ]


# ---------------------------------------------------------------------------------------------------- those of users


def llama(depth: int, width: int, sequences: int, length: int = 1024, *, vocabulary: int = 16384, head: int = 64,
          tile: int = 64, peak_bar: float | None = None) -> Work:
    """Hugging Face's, its head not tied to the embedding. All linear layers of its body become integers."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = width // head
        inner = -(-8 * width // (3 * tile)) * tile  # 8/3 of the width, as Llama has it, in whole tiles
        config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=depth,
                             num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length,
                             use_cache=False, tie_word_embeddings=False)
        return LlamaForCausalLM(config)

    def tokens(device: torch.device) -> Batch:
        x = torch.randint(vocabulary, (sequences, length), device=device)
        return x, x

    return Work(f"Llama {depth}×{width}, {sequences}×{length} tokens", build, lambda module, name: ".layers." in name,
                tokens, {"eager": 1.10, "compiled": 1.05, "captured": 0.95}, own_loss, peak_bar=peak_bar,
                more=(Ours(2, momentum=True),), needs="transformers")


def wide_llama(depth: int, width: int, **sizes: int) -> Work:
    """Wide enough that products are most of a step: what low precision is for. A few layers, as many tell the same."""
    work = llama(depth, width, **{"sequences": 8, "head": 128, "tile": 256, **sizes})
    return replace(work, bars={"captured": work.bars["captured"]}, bits=(4,),
                   more=(Ours(4, "fp8"), Ours(4, "int8"), Ours(2, "fp8")))


def resnet(name: str, build: Callable[[], nn.Module], side: int, batch: int, classes: int) -> Work:
    """Convolutions, images and weights channels_last: the order in which tensor cores multiply them."""

    def images(device: torch.device) -> Batch:
        x = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        return x, torch.randint(classes, (batch,), device=device)

    def channels_last() -> nn.Module:
        return build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    return Work(f"{name}, batch {batch} of {side}×{side}", channels_last, in_blocks, images,
                {"eager": 1.3, "compiled": 1.3, "captured": 1.2})


def of_users(small: bool) -> list[Work]:
    def resnet50(classes: int, width: int, blocks: tuple[int, ...]) -> ResNet:
        return ResNet(3, classes, width, blocks, Bottleneck, large_image_stem)

    if small:
        return [llama(2, 32, 2, 16, vocabulary=64, head=16, peak_bar=0.75),
                wide_llama(2, 48, sequences=2, length=16, vocabulary=64, head=16, tile=16),
                resnet("ResNet-18", lambda: ResNet(3, 10, 4, (1, 1)), 8, 2, 10),
                resnet("ResNet-50", lambda: resnet50(10, 4, (1, 1)), 32, 2, 10)]
    return [llama(12, 768, 16, peak_bar=0.75), llama(24, 1024, 8), wide_llama(4, 2048), wide_llama(2, 4096),
            resnet("ResNet-18", ResNet, 32, 256, 10),
            resnet("ResNet-50", lambda: resnet50(1000, 64, (3, 4, 6, 3)), 224, 64, 1000)]


def works(device: torch.device, small: bool = False) -> list[Work]:
    """On a CPU the DNNs alone, since a step of the others takes minutes there; small ones of all kinds anywhere."""
    if small or device.type == "cuda":
        return [*of_the_paper(small), *of_users(small)]
    return [dnn(1024, 5, 256, (2, 4)), dnn(4096, 5, 256)]
