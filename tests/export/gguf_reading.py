"""Read a GGUF file back, independently of what wrote it, and let llama.cpp continue a text."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34),
         34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 42: ("Q2_0", 64, 18)}
NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}


class GgufFile:
    """settings: key -> value; types: tensor -> type; `floats(name)`: a tensor's values, in float32."""

    def __init__(self, path: Path) -> None:
        self._bytes, self._at = path.read_bytes(), 0
        assert self._bytes[:4] == b"GGUF"
        self._at = 4
        assert self._number("I") == 3
        tensors, keys = self._number("Q"), self._number("Q")
        self.settings = {self._text(): self._value(self._number("I")) for _ in range(keys)}
        infos = {}
        for _ in range(tensors):
            name = self._text()
            shape = [self._number("Q") for _ in range(self._number("I"))][::-1]
            infos[name] = shape, TYPES[self._number("I")], self._number("Q")
        start = -(-self._at // 32) * 32
        self.types = {name: kind[0] for name, (_, kind, _) in infos.items()}
        self._tensors = {name: (shape, kind, start + offset) for name, (shape, kind, offset) in infos.items()}

    def _number(self, code: str) -> Any:
        value, = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 9:
            inner, length = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(length)]
        return self._text() if kind == 8 else self._number(NUMBERS[kind])

    def floats(self, name: str) -> Tensor:
        gguf = pytest.importorskip("gguf")
        shape, (kind, columns, size), start = self._tensors[name]
        count = int(np.prod(shape)) // columns * size
        raw = np.frombuffer(self._bytes, np.uint8, count, start)
        if kind == "Q2_0":  # not known to gguf 0.19
            blocks = raw.reshape(-1, 18)
            codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
            values = (codes.reshape(-1, 64).astype(np.float32) - 1) * blocks[:, :2].copy().view(np.float16)
        else:
            values = gguf.quants.dequantize(raw.reshape(-1, size), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(values.astype(np.float32)).view(shape)


def llama_cpp_continues(path: Path, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """The `count` likeliest tokens after the prompt, each after those before it, and the log-probabilities of all tokens at
    each place, (count, vocabulary). Keys and values are kept in float32. By llama-cpp-python, or by xllamacpp: the same
    library in a wheel that need not be compiled."""
    try:
        import llama_cpp
    except ImportError:
        return _by_xllamacpp(path, prompt, count)
    llama = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
                            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    tokens: list[int] = []
    for _ in range(count):
        llama.eval(tokens[-1:] or prompt)
        tokens.append(int(llama.scores[llama.n_tokens - 1].argmax()))
    logits = torch.tensor(llama.scores[len(prompt) - 1 : len(prompt) - 1 + count])
    llama.close()
    return tokens, logits.log_softmax(-1)


def divergence(model: Any, path: Path, prompt: list[int], count: int) -> tuple[list[int], list[int], Tensor]:
    """llama.cpp's tokens, ours at the same places, and KL(ours || llama.cpp's) of each distribution."""
    tokens, theirs = llama_cpp_continues(path, prompt, count)
    with torch.no_grad():
        ours = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return tokens, ours.argmax(-1).tolist(), (ours.exp() * (ours - theirs)).sum(-1)


def _by_xllamacpp(path: Path, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama-cpp-python or xllamacpp")
    known = GgufFile(path).settings
    vocabulary = known[f"{known['general.architecture']}.vocab_size"]
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.cpuparams.n_threads = str(path), 512, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in float16
    server = xllamacpp.Server(settings)
    # It writes characters and keeps back a token that is a part of one. So it is made to write "!" at every place, which
    # leaves the log-probabilities as they are.
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": vocabulary, "logit_bias": [["!", 1000.0]]}
    tokens, table = [], torch.empty(count, vocabulary)
    for row in range(count):
        answer = server.handle_completions({"prompt": prompt + tokens, **asked})
        place, = answer["choices"][0]["logprobs"]["content"]
        for one in place["top_logprobs"]:
            table[row, one["id"]] = one["logprob"]
        tokens.append(int(table[row].argmax()))
    return tokens, table
