"""Text from trained models, and the paper's figure of it."""

import pytest
import torch
from typer.testing import CliRunner

from gft.cli import app
from gft.errors import UsageError
from gft.lab import data, generate, recipes, tables, train
from gft.lab.models import GPT

TINY = ["data=verses", "width=32", "depth=1", "heads=2", "steps=40", "batch=8", "warmup=1", "eval_every=20"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer") / "run"
    for _ in train.training(recipes.find("verses-gpt-hybrid2-2bit").changed(TINY), folder, device="cpu"):
        pass
    return folder


def test_generated_text_is_of_the_datas_characters_and_depends_on_the_seed(writer):
    alphabet = set(data.load("verses").characters)
    texts = ["".join(generate.generate(writer, "Shall I", length=50, seed=seed, device="cpu")) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) == 50 and set(text) <= alphabet for text in texts)


def test_temperature_zero_and_the_single_likeliest_agree(writer):
    cold = "".join(generate.generate(writer, length=20, temperature=0, seed=3, device="cpu"))
    single = "".join(generate.generate(writer, length=20, top_k=1, seed=4, device="cpu"))
    assert cold == single


def test_next_tokens_are_drawn_from_the_models_own_distribution():
    torch.manual_seed(0)
    model = GPT(5, context=8, width=16, depth=1, heads=2).eval()
    with torch.no_grad():
        model.head.weight.mul_(40)
        wanted = model(torch.tensor([[1, 2]]))[0, -1].softmax(0)
    generator = torch.Generator().manual_seed(0)
    drawn = [next(generate.next_tokens(model, torch.tensor([[1, 2]]), 1.0, 5, generator)) for _ in range(1000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / 1000
    assert torch.allclose(shares, wanted, atol=0.05)


@pytest.mark.parametrize(("options", "says"), [
    (["--temperature", "-1"], "--temperature"), (["--top-k", "0"], "--top-k"), (["--prompt", ""], "--prompt is empty"),
    (["--prompt", "é"], "é")])
def test_bad_options_are_refused_in_a_sentence(writer, options, says):
    outcome = CliRunner().invoke(app, ["generate", str(writer), "--device", "cpu", *options])
    assert isinstance(outcome.exception, UsageError)
    assert says in str(outcome.exception)


def test_generate_prints_the_prompt_and_what_follows(writer):
    outcome = CliRunner().invoke(app, ["generate", str(writer), "--prompt", "When I", "--length", "30", "--device", "cpu"])
    assert outcome.exit_code == 0
    assert outcome.output.startswith("When I")
    assert len(outcome.output) == len("When I") + 30 + 1


def test_a_run_folder_writes_without_its_text_and_refuses_another(tmp_path):
    file = tmp_path / "own.txt"
    verses = data.load("verses")
    text = verses.decode(verses.train[:4000])
    file.write_text(text)
    recipe = recipes.find("verses-gpt-hybrid2-2bit").changed([*TINY, f"data=text:{file}", "steps=4"])
    run = tmp_path / "run"
    training = train.training(recipe, run, device="cpu", checkpoint_every=2)
    for _ in range(3):
        next(training)
    training.close()  # as good as killed: nothing is saved
    written = "".join(generate.generate(run, length=30, device="cpu"))

    before = (run / "metrics.jsonl").read_bytes()
    for other in (text.replace("a", "å"), text + "å"):  # as many characters as before, whose names alone differ; one more
        file.write_text(other)
        assert "".join(generate.generate(run, length=30, device="cpu")) == written
        with pytest.raises(train.TrainingError, match="other characters or tokens now"):
            train.evaluate_run(run, "val", "cpu")
        with pytest.raises(train.TrainingError, match="other characters or tokens now"):
            next(train.training(recipe, run, device="cpu", resume=True))
        assert (run / "metrics.jsonl").read_bytes() == before

    file.unlink()
    assert "".join(generate.generate(run, length=30, device="cpu")) == written
    file.write_text(text)
    assert list(train.training(recipe, run, device="cpu", resume=True))[-1].result


def test_nothing_is_printed_before_what_is_wrong_is_said(tmp_path):
    outcome = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "When I", "--device", "cpu"])
    assert isinstance(outcome.exception, train.TrainingError)
    assert outcome.output == ""


def test_a_run_that_writes_no_text_is_refused(tmp_path):
    recipe = recipes.find("digits-fp").changed(["width=16", "steps=2"])
    list(train.training(recipe, tmp_path / "run", device="cpu"))
    with pytest.raises(train.TrainingError, match="writes no text"):
        next(generate.generate(tmp_path / "run", device="cpu"))


def test_samples_trains_what_is_missing_and_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "SAMPLE", 40)
    settings = [*TINY, "steps=4"]
    file = tables.samples(tmp_path, device="cpu", settings=settings)
    text = file.read_text()
    assert all(recipes.find(name).row in text for name in tables.SAMPLED)
    monkeypatch.setattr(train, "cross_entropy", None)  # the second time nothing is trained
    assert tables.samples(tmp_path, device="cpu", settings=settings).read_text() == text
