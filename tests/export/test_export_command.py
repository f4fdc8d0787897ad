"""gft export as a user types it."""

import sys

import pytest
import torch
from export_models import relative_error, run_without_gft
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


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 32}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
OTHERS = {  # class, config, settings, names of inputs
    "BERT": ("BertForSequenceClassification", "BertConfig", {**TEXT, "num_labels": 3}, ["input_ids"]),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**IMAGE, "num_labels": 3}, ["pixel_values"]),
    "CLIP": ("CLIPModel", "CLIPConfig", {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE,
                                         "projection_dim": 16}, ["input_ids", "pixel_values"]),
}


@pytest.fixture
def folder_of(tmp_path):
    """folder_of("BERT") -> a quantized model, saved in "folder", inputs of other sizes than the export has seen, and what
    comes out."""
    transformers = pytest.importorskip("transformers")

    def save(name):
        kind, config, settings, takes = OTHERS[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
        gft.quantize_(model, 4).save_pretrained(tmp_path / "folder")
        made = {"input_ids": torch.randint(3, 60, (4, 9)), "pixel_values": torch.randn(5, 3, 16, 16)}
        inputs = {key: made[key] for key in takes}
        with torch.no_grad():
            result = model(**inputs)
        return model, inputs, result.logits if "logits" in result else result.logits_per_image

    return save


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_any_architecture_gives_the_same_logits_in_onnxruntime(name, export, folder_of):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    _, inputs, expected = folder_of(name)
    assert export("folder", "--to", "onnx", "--out", "model.onnx")[0] == 0
    outputs = runtime.InferenceSession("model.onnx").run(None, {key: value.numpy() for key, value in inputs.items()})
    assert relative_error(outputs[0], expected) < 1e-5


@pytest.mark.parametrize("name", ["BERT", "ViT"])
def test_a_model_of_any_architecture_becomes_a_program_that_runs_without_gft(name, export, folder_of, tmp_path):
    _, inputs, expected = folder_of(name)
    torch.save(inputs, tmp_path / "inputs.pt")
    assert export("folder", "--to", "torch", "--out", "model.pt2")[0] == 0
    script = """
program = torch.export.load(sys.argv[1]).module()
torch.save(program(**torch.load("inputs.pt"))["logits"], "logits.pt")
assert "transformers" not in sys.modules
"""
    run_without_gft(script, "model.pt2", folder=tmp_path)
    assert relative_error(torch.load(tmp_path / "logits.pt"), expected) < 1e-5


def test_a_classifier_goes_to_compressed_tensors_with_its_tokenizer(export, folder_of, tmp_path):
    pytest.importorskip("compressed_tensors")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model, inputs, expected = folder_of("BERT")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "word": 1}, "[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "folder")
    assert export("folder", "--to", "compressed-tensors", "--out", "out")[0] == 0
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert relative_error(loaded(**inputs).logits, expected) < 1e-5
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("word")["input_ids"] == [1]
    code, _, error = export("folder", "--to", "gguf", "--out", "model.gguf")
    assert code == 2
    assert "a BertForSequenceClassification cannot be written" in error


def test_models_whose_inputs_are_not_known_get_one_sentence(export, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=60,
                                        num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
                                        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    model = transformers.WhisperForConditionalGeneration(config)
    gft.quantize_(model, 4, skip_tied=True).save_pretrained(tmp_path / "folder")
    code, _, error = export("folder", "--to", "torch", "--out", "model.pt2")
    assert code == 2
    assert "a WhisperForConditionalGeneration does not run on the inputs that are made for it here (none)" in error
    assert not (tmp_path / "model.pt2").exists()


def test_a_folder_of_an_architecture_that_transformers_has_not_gets_one_sentence(export, folder_of, tmp_path):
    folder_of("BERT")
    path = tmp_path / "folder" / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "BertForDreams"))
    code, _, error = export("folder", "--to", "onnx", "--out", "model.onnx")
    assert code == 2
    assert "folder is a BertForDreams, which this transformers has not" in error
