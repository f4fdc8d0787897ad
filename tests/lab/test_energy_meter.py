"""Energy measured: windows around counters that only pretend to count, and recipes trained inside them."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gft.cli import app
from gft.errors import UsageError
from gft.lab import energy, recipes
from gft.lab.energy import sheets
from gft.lab.energy.meter import GpuCounter, RaplCounter, cpu_counters, gpu_counter
from gft.lab.energy.trials import Plan, measure_recipes
from gft.lab.models import ViT

TINY = ["data=digits", "width=24", "depth=3", "batch=32", "steps=40"]
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------- counters and windows


class Clock:
    """Time that passes only when it is asked to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeCounter:
    """A machine that takes `watts`, and more when work is added to it."""

    def __init__(self, clock, watts=50.0, name="gpu"):
        self.clock, self.watts, self.name, self.about, self.work, self.reads = clock, watts, name, "a fake", 0.0, 0

    def joules(self):
        self.reads += 1
        return 1000.0 + self.watts * self.clock() + self.work


def steps_of(clock, counter, seconds, joules, log=None, name=""):
    """An endless run whose first step builds and warms up at ten times the cost."""
    for number in itertools.count():
        clock.sleep(seconds)
        counter.work += joules * (10 if number == 0 else 1)
        if log is not None:
            log.append(name)
        yield number


def test_a_window_is_gross_and_net_of_idle():
    clock = Clock()
    gpu, cpu = FakeCounter(clock), FakeCounter(clock, 8.0, "cpu package-0")
    idle = energy.idle_power([gpu, cpu], 4.0, sleep=clock.sleep, clock=clock)
    assert idle == pytest.approx({"gpu": 50.0, "cpu package-0": 8.0})
    with energy.measure([gpu, cpu], idle=idle, clock=clock) as window:
        with pytest.raises(UsageError, match="no reading yet"):
            _ = window.reading
        clock.sleep(2.0)
        gpu.work += 300.0
    reading = window.reading
    assert reading.seconds == 2.0
    assert reading.joules == pytest.approx({"gpu": 400.0, "cpu package-0": 16.0})
    assert reading.gross == pytest.approx(416.0)
    assert reading.net == pytest.approx(300.0)


def test_a_window_waits_for_kernels_at_both_ends():
    clock, calls = Clock(), []
    counter = FakeCounter(clock)
    with energy.measure([counter], wait=lambda: calls.append(counter.reads), clock=clock):
        pass
    assert calls == [0, 1]  # before the first read and before the last


def test_runs_take_turns_and_their_warm_up_is_not_measured():
    clock, log = Clock(), []
    counter = FakeCounter(clock, watts=0.0)
    runs = {"a": steps_of(clock, counter, 0.5, 3.0, log, "a"), "b": steps_of(clock, counter, 0.25, 1.0, log, "b")}
    readings = list(energy.measure_steps(runs, [counter], steps=4, repeats=2, warmup=3, clock=clock))
    assert [(name, reading.gross, reading.seconds) for name, reading in readings] == [
        ("a", 12.0, 2.0), ("b", 4.0, 1.0)] * 2
    assert "".join(log) == "aaabbb" + "aaaabbbb" * 2


def test_a_run_that_ends_too_soon_is_an_error(refuses):
    clock = Clock()
    with refuses(UsageError, "a ended 3 steps before the window did"):
        list(energy.measure_steps({"a": iter(range(7))}, [FakeCounter(clock)], steps=5, repeats=2, clock=clock))


def test_mean_and_spread():
    assert energy.mean_std([3.0]) == (3.0, 0.0)
    assert energy.mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**0.5))


def powercap(folder: Path, *zones: tuple[str, str]) -> Path:
    for zone, name in zones:
        (folder / zone).mkdir(parents=True)
        (folder / zone / "name").write_text(name + "\n")
        (folder / zone / "max_energy_range_uj").write_text("262143328850\n")
        (folder / zone / "energy_uj").write_text("262143000000\n")
    return folder


def test_rapl_counts_packages_and_on_where_the_register_starts_anew(tmp_path):
    folder = powercap(tmp_path, ("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram"), ("intel-rapl:1", "psys"))
    (counter,) = cpu_counters(folder)
    assert (counter.name, counter.joules()) == ("cpu package-0", 0.0)
    register = folder / "intel-rapl:0" / "energy_uj"
    for value, joules in ((262143328850, 0.32885), (1_000_000, 1.32885), (1_500_000, 1.82885)):
        register.write_text(str(value))
        assert counter.joules() == pytest.approx(joules)


def test_a_long_window_looks_at_its_counters_now_and_then():
    clock = Clock()
    counter = FakeCounter(clock)
    run = steps_of(clock, counter, 25.0, 1.0)
    next(run)
    list(energy.measure_steps({"a": run}, [counter], steps=10, clock=clock))
    assert counter.reads == 2 + 3  # 250 s


class FakeNvml:
    """Of the module pynvml, what the counter calls."""

    class NVMLError(Exception):
        pass

    def __init__(self, supported=True):
        self.supported, self.millijoules = supported, 5000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-12"
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.supported:
            raise self.NVMLError("Not Supported")
        return self.millijoules

    def nvmlDeviceGetName(self, handle):
        return "a GPU"

    def nvmlSystemGetDriverVersion(self):
        return "1.2"


def test_gpu_counter_reads_joules_or_says_why_not(refuses):
    nvml = FakeNvml()
    counter = GpuCounter("GPU-12", nvml)
    nvml.millijoules = 7500
    assert counter.joules() == 7.5
    assert counter.about == "NVML, a GPU, driver 1.2"
    with refuses(energy.NotMeasurable, "not measurable here: NVML says 'Not Supported'"):
        GpuCounter("GPU-12", FakeNvml(supported=False))


def test_gpu_counter_names_the_extra_that_brings_it(monkeypatch, refuses):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if not installed
    with refuses(energy.NotMeasurable, r"pip install .*\[energy\]'"):
        gpu_counter(torch.device("cuda"))


def test_counters_are_found_or_the_reason_why_not(tmp_path, refuses):
    gpu = FakeCounter(Clock())
    counters, missing = energy.find_counters("cuda", tmp_path, gpu=lambda device: gpu)
    assert counters == [gpu]
    assert len(missing) == 1
    assert "CPU's energy is not measurable here" in missing[0]
    with refuses(energy.NotMeasurable, "not measurable here"):
        energy.find_counters("cpu", tmp_path)
    with refuses(energy.NotMeasurable, "type mps"):
        energy.find_counters("mps", tmp_path)
    powercap(tmp_path, ("intel-rapl:0", "package-0"))
    counters, missing = energy.find_counters("cuda", tmp_path, gpu=lambda device: gpu)
    assert [counter.name for counter in counters] == ["gpu", "cpu package-0"]
    assert missing == []
    assert isinstance(energy.find_counters("cpu", tmp_path)[0][0], RaplCounter)
    with refuses(energy.NotMeasurable, "no counter to measure with"), energy.measure([]):
        pass


# ---------------------------------------------------------------------------------------------------- recipes


class WorkCounter:
    """A machine that takes a joule each time it is looked at."""

    name, about = "gpu", "a fake"

    def __init__(self):
        self.total = 0.0

    def joules(self):
        self.total += 1.0
        return self.total


@pytest.mark.parametrize("full", [False, True])
def test_recipes_are_measured_side_by_side(full):
    chosen = [recipes.find(name).changed(TINY) for name in ("mnist-dnn-fp", "mnist-dnn-quantized-2bit")]
    report = measure_recipes(chosen, [WorkCounter()], Plan(steps=5, repeats=2, warmup=3, full=full, idle_seconds=0), CPU)
    report |= {"about": {"command": "gft energy measure …", "commit": "abc"}, "not_measured": ["no RAPL"]}
    for row, name in zip(report["rows"], ("mnist-dnn-fp", "mnist-dnn-quantized-2bit"), strict=True):
        assert row["recipe"] == name
        assert len(row["readings"]) == 2
        window = 36 if full else 5
        assert row["gross_j_per_step"] == row["net_j_per_step"] == (pytest.approx(1 / window), pytest.approx(0))
        assert row["estimate"]["whole"] > row["estimate"]["optimizer"] > 0
        assert ("results" in row) == full
    if full:
        values = [result["value"] for result in report["rows"][1]["results"]]
        assert report["rows"][1]["value"][0] == pytest.approx(sum(values) / 2)
        assert 0 < report["rows"][1]["estimate"]["moved"] < 0.5
    text = sheets.measured_sheet(json.loads(json.dumps(report))).markdown()
    assert "| mnist-dnn-quantized-2bit |" in text
    assert "no RAPL" in text
    assert "too short for a GPU's counter" in text


def test_whole_images_at_the_end_are_of_whole_trainings_alone(monkeypatch):
    asked, drop_patches = [], ViT.drop_patches

    def counting(model, share):
        if share == 0 and not model.positions.is_meta:  # those of an estimate are
            asked.append(True)
        drop_patches(model, share)

    monkeypatch.setattr(ViT, "drop_patches", counting)
    recipe = recipes.find("mnist-vit-fp").changed(["data=digits-images", "patch=2", "width=16", "depth=1", "heads=2",
                                                   "batch=16", "patch_dropout=0.75", "whole_images=0.5", "steps=6"])
    forward = {}
    for full in (False, True):  # six steps of windows are as long as the training
        plan = Plan(steps=2, repeats=2 - full, warmup=2, full=full, idle_seconds=0)
        report = measure_recipes([recipe], [WorkCounter()], plan, CPU)
        forward[full] = report["rows"][0]["estimate"]["forward"]
        assert asked == [True] * full
    assert forward[True] > 1.5 * forward[False]


def test_a_method_the_paper_does_not_estimate_is_measured_without():
    chosen = recipes.find("mnist-baselines-ste-4bit").changed(TINY)
    report = measure_recipes([chosen], [WorkCounter()], Plan(steps=2, repeats=1, warmup=1, idle_seconds=0), CPU)
    assert report["rows"][0]["estimate"] is None
    sheet = sheets.measured_sheet({**report, "about": {"command": "…"}, "not_measured": []})
    assert sheet.rows[0][-2:] == ["–", "–"]


def test_measure_trains_nothing_where_there_is_no_counter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["energy", "measure", "mnist-dnn-fp", "--device", "cpu"]
    if Path("/sys/class/powercap/intel-rapl:0").exists():
        pytest.skip("this machine has a counter")
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, energy.NotMeasurable)  # which main() prints, exit code 2
    assert "not measurable here" in str(done.exception)
    assert not any(tmp_path.iterdir())


def test_measure_refuses_what_it_would_overwrite_or_never_reach(tmp_path, refuses):
    (tmp_path / "measured.json").write_text("{}")
    done = CliRunner().invoke(app, ["energy", "measure", "digits-fp", "--device", "cpu", "--out", str(tmp_path)])
    assert "holds a measurement already" in str(done.exception)
    for options, says in (({"warmup": 400, "full": True}, "digits-fp has 360 steps"), ({"warmup": 1, "node": "3nm"}, "3nm")):
        with refuses(UsageError, says):
            measure_recipes([recipes.find("digits-fp")], [WorkCounter()], Plan(steps=5, repeats=1, **options), CPU)
