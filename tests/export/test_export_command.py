"""gft export as a user types it."""

import sys

import pytest
from gguf_reading import GgufFile

import gft

pytest.importorskip("typer")

from gft import cli


@pytest.fixture
def export(monkeypatch, capsys, tmp_path):
    """export("folder", "--to", "gguf", …) in an empty folder -> exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gft", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("arguments", "says"), [
    (["--to", "gguff"], "--to gguff: choose one of gguf, onnx"),
    (["--to", "gguf"], "nowhere is neither a folder nor the name of a model"),
    (["--to", "gguf", "--set", "ternery=Q2_0"], "--to gguf has the keys tokenizer, pre, ternary, dtype, fallback"),
    (["--to", "gguf", "--set", "ternary"], "give KEY=VALUE"),
])
def test_mistakes_get_one_sentence(arguments, says, export, tmp_path):
    code, _, error = export("nowhere", "--out", "model.gguf", *arguments)
    assert code == 2
    assert error.startswith("error: ")
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_folder_without_a_model_gets_one_sentence(export, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, error = export("empty", "--to", "gguf", "--out", "model.gguf")
    assert code == 2
    assert "empty has no config.json" in error


def test_a_run_folder_is_read_and_what_gguf_cannot_hold_is_refused(export, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gft", "train", "digits-quantized-2bit", "--steps", "2", "--device", "cpu", "--set",
                                      "width=32", "--no-tensorboard", "--out", "run"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main()
    code, _, error = export("run", "--to", "gguf", "--out", "model.gguf")
    assert code == 2
    assert "GGUF export takes causal language models" in error
    assert not (tmp_path / "model.gguf").exists()


@pytest.fixture
def llama_folder(tmp_path):
    """A quantized Llama, and the folder that transformers would write of it."""
    hf, transformers = pytest.importorskip("gft.integrations.hf"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=50)
    model = gft.quantize_(transformers.LlamaForCausalLM(config), 2, lambda m, name: ".layers." in name)
    hf.save(model, tmp_path / "folder")
    return model


def test_a_folder_of_transformers_becomes_a_gguf_file(export, llama_folder, tmp_path):
    pytest.importorskip("gguf")
    code, out, _ = export("folder", "--to", "gguf", "--out", "model.gguf", "--set", "ternary=Q2_0")
    assert code == 0
    assert "Written: model.gguf" in out
    file = GgufFile(tmp_path / "model.gguf")
    weight = file.floats("blk.0.ffn_up.weight") * file.floats("blk.0.ffn_up.scale")
    assert weight.equal(llama_folder.model.layers[0].mlp.up_proj.float_weight())


@pytest.mark.parametrize(("to", "written"), [("onnx", "out"), ("torch", "out"), ("hf", "out/config.json"),
                                             ("compressed-tensors", "out/config.json")])
def test_a_folder_of_transformers_goes_to_every_target(to, written, export, llama_folder, tmp_path):
    if to in ("onnx", "compressed-tensors"):
        pytest.importorskip({"onnx": "onnxscript"}.get(to, "compressed_tensors"))
    code, out, _ = export("folder", "--to", to, "--out", "out")
    assert (code, "Written: out" in out) == (0, True)
    text = (tmp_path / written).read_bytes()
    assert len(text) > 100
    assert written == "out" or b'"use_cache": true' in text  # switched off for graphs alone
