"""What tests of exports share: models to export, and a fresh Python that has no gft."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gft
from gft.layers import quantized_layers

WITHOUT_GFT = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "gft":
            raise ImportError("gft is not here")
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
"""

VOCABULARY = 300
TEXT = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs!\n"


def run_without_gft(script: str, *arguments: Any, folder: Path) -> str:
    """Run a script in a fresh, isolated Python where `import gft` fails; its output."""
    done = subprocess.run([sys.executable, "-I", "-c", WITHOUT_GFT + script, *map(str, arguments)], cwd=folder,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def conv_net(bits: int, memory: bool = True, gain: bool | None = None) -> nn.Module:
    """Convolutions with and without groups, and linear layers of odd sizes; gains that are not 1."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, (3, 2), stride=2, groups=2, bias=False),
                        nn.ReLU(), nn.Flatten(1), nn.Linear(6 * 3 * 4, 63), nn.Tanh(), nn.Linear(63, 65))
    gft.quantize_(net, bits, memory=memory, gain=gain)
    return with_gains(net).eval()


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def with_gains(model: nn.Module) -> nn.Module:
    """The model with each gain there is a little away from 1."""
    with torch.no_grad():
        for number, layer in enumerate(quantized_layers(model).values()):
            if layer.log_gain is not None:
                layer.log_gain.fill_((0.3 + 0.1 * number) / layer.columns**0.5)
    return model


def relative_error(result: Any, wanted: Tensor) -> float:
    """The largest error, in the largest value that is wanted."""
    wanted = wanted.detach()
    return float((torch.as_tensor(result).detach() - wanted).abs().max() / wanted.abs().max())


def llama(bits: int, memory: bool = True, quantize: bool = True, **config: Any) -> Any:
    """A tiny Llama of transformers with odd sizes, its layers quantized and its head left float."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 65, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))
    if quantize:
        gft.quantize_(model, bits, lambda _, name: ".layers." in name, memory=memory)
    return with_gains(model).eval()


def tokens(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(5))


def language_model(kind: str, **config: Any) -> Any:
    """A tiny float language model of transformers ("Llama", "Qwen3", …) with grouped queries, whose norms and biases are not
    all alike."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 0}
    settings = getattr(transformers, f"{kind}Config")(**{**sizes, **config})
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, float("norm" in name), 0.3)
    return model


def with_random_gains(model: nn.Module) -> nn.Module:
    for layer in quantized_layers(model).values():
        if layer.log_gain is not None:
            nn.init.normal_(layer.log_gain, 0, 0.03)
    return model


def in_blocks(module: nn.Module, name: str) -> bool:
    return ".layers." in name
