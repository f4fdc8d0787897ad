"""What all tests share: one thread, fixed seeds, and three small helpers."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import hypothesis
import pytest
import torch
from tiny_network import TinyNet
from torch import nn

# Before gft, and with it torch's compiler, imports Triton: without a GPU its kernels run through the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Before gft makes its console: plain text that fits the usual terminal, whatever the one that tests run in is like.
os.environ["COLUMNS"] = "80"
os.environ.pop("FORCE_COLOR", None)

import no_warmup  # noqa: F401

import gft
from gft.errors import UsageError

torch.set_num_threads(1)

# Derandomized: a test fails for everyone or for no one.
hypothesis.settings.register_profile("gft", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("gft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _same_library_of_products() -> Iterator[None]:
    """A bfloat16 product on a CPU without bfloat16 makes torch leave oneDNN for good, also for float32, whose last bits then
    differ from another process'."""
    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.fixture
def refuses() -> Callable[[type[Exception], str], AbstractContextManager[None]]:
    """`with refuses(ValueError, "bits=1"):` the block raises that kind of error, in one sentence."""

    @contextmanager
    def check(kind: type[Exception], match: str) -> Iterator[None]:
        with pytest.raises(kind, match=match) as caught:
            yield
        message = str(caught.value)
        assert issubclass(caught.type, UsageError) or caught.type is kind
        assert "\n" not in message
        assert ". " not in message
        assert len(message) < 400

    return check


@pytest.fixture
def rng_untouched() -> Callable[[], AbstractContextManager[None]]:
    """`with rng_untouched():` the block neither reads nor moves torch's global generator."""

    @contextmanager
    def check() -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), before)

    return check


@pytest.fixture
def tiny_net() -> Callable[..., nn.Module]:
    """tiny_net(seed=0, bits=4, memory=True, dropout=0.0) -> a quantized TinyNet; bits=None leaves it in float."""

    def build(seed: int = 0, bits: int | None = 4, memory: bool = True, dropout: float = 0.0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: nn.Module = TinyNet(dropout)
            return model if bits is None else gft.quantize_(model, bits, lambda m, name: ".mlp." in name, memory=memory)

    return build


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight batches of 16 samples that a TinyNet can learn."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 16, 6, generator=generator)
    y = (x @ torch.randn(6, 5, generator=generator)).argmax(-1)
    return list(zip(x, y, strict=True))
