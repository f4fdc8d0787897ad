"""Fine-tuning studies: every method starts from the same levels, and a trial says what it reached."""

import csv

import pytest
import torch

import gft
from gft.lab import finetune
from gft.layers import quantized_layers

PLAN = finetune.Plan(data="digits-images", width=4, blocks=1, batch=64, float_steps=2, steps=2, augment="none")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    data = finetune.datasets.load("digits-images")
    return finetune.float_network(PLAN, data, torch.device("cpu")), data


@pytest.mark.parametrize(("init", "scales"), [("keep", "tensor"), ("fit", 4), ("gptq", "row")])
def test_straight_through_training_starts_from_the_levels_of_gft(network, init, scales):
    model, data = network
    ours = finetune.started(PLAN, finetune.Trial(3, init, scales), model, data)
    theirs = finetune.straight_through_(finetune.copy.deepcopy(model), ours)
    for name, layer in quantized_layers(ours).items():
        assert torch.allclose(theirs.get_submodule(name).weight, layer.float_weight(), atol=1e-6), name
    x = next(iter(data.evaluation_batches("val", 8)))[0]
    assert torch.allclose(theirs.eval()(x), ours.eval()(x), atol=1e-3)
    theirs(x).sum().backward()
    latent = [parameter for name, parameter in theirs.named_parameters() if name.endswith("weight.original")]
    assert len(latent) == len(quantized_layers(ours))
    assert all(parameter.grad.any() for parameter in latent)


def test_a_study_trains_every_trial_and_keeps_what_it_takes_to_repeat_it(tmp_path):
    said, file, device = [], tmp_path / "study.csv", torch.device("cpu")
    trials = [finetune.Trial(2, "fit", "row"), finetune.Trial(2, "fit", "row", "ste", 1e-3)]
    outcomes = list(finetune.study(PLAN, trials, device, said.append))
    assert [outcome.trial for outcome in outcomes] == trials
    assert len(said) == 3
    assert outcomes[0].at_start == pytest.approx(outcomes[1].at_start, abs=0.5)  # the same levels, another order of sums
    finetune.append(outcomes, PLAN, file, device, "gft finetune")
    assert finetune.known(file, PLAN) == set(trials)
    assert finetune.known(file, finetune.Plan()) == finetune.known(tmp_path / "none.csv", PLAN) == set()
    finetune.append(outcomes, PLAN, file, device, "gft finetune")
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 4
    assert {rows[0]["command"], rows[0]["scales"], rows[1]["method"]} == {"gft finetune", "row", "ste"}


def test_trials_cover_starts_and_rates_of_both_methods():
    trials = finetune.trials_of((2,))
    assert len(set(trials)) == len(trials)
    assert {trial.method for trial in trials} == {"gft", "ste"}
    assert {(trial.init, trial.scales) for trial in trials} == set(finetune.STARTS)
    with pytest.raises(gft.UsageError, match="no images"):
        next(finetune.study(finetune.Plan(data="digits"), trials, torch.device("cpu"), print))
