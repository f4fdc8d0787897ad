"""checkpoint.py: a resumed run is the same run; a damaged file is refused and changes nothing."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors
import torch
import torch.nn.functional as F
from helpers import all_of, equal, same
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import gft
from gft import CheckpointError
from gft.checkpoint import FORMAT, OLDER, checksum, flatten, read_checkpoint, unflatten
from gft.storage import pack_fields


class Run:
    """A model with dropout, its optimizer and its schedule."""

    def __init__(self, model: nn.Module, **settings) -> None:
        self.model = model
        self.optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.4, **{"seed": 9, **settings}),
                                    torch.optim.AdamW(gft.dense(model), lr=3e-3))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)

    def train(self, data) -> None:
        for x, y in data:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad(); loss.backward(); self.optimizer.step(); self.scheduler.step()

    def save(self, path: Path, **extra) -> Path:
        return gft.save_checkpoint(path, self.model, self.optimizer, self.scheduler, **extra)

    def load(self, path: Path) -> dict:
        return gft.load_checkpoint(path, self.model, self.optimizer, self.scheduler)

    def snapshot(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()] + [torch.get_rng_state()]


@pytest.fixture
def run(tiny_net, batches, tmp_path) -> Run:
    run = Run(tiny_net(dropout=0.2))
    run.train(batches[:1])
    return run


# ---------------------------------------------------------------------------------------------------- resuming


WAYS = {
    "memory": ({"rule": gft.Rounding(inertia=0.7), "vote": gft.Int4()}, True),
    "no inertia": ({"rule": gft.Rounding(inertia=0.0)}, True),
    "packed": ({"rule": gft.Rounding(threshold=0.8, second_moment="running")}, False),
    "half a byte": ({"rule": gft.Rounding(orthogonalize=True)}, "half"),
    "momentum": ({"rule": gft.Rounding(momentum=0.9, orthogonalize=True)}, True),
    "momentum of low rank": ({"rule": gft.Rounding(momentum_rank=3)}, False),
    "topk": ({"rule": gft.TopK(p_min=0.05), "vote": gft.Sign(per="sequence")}, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_resumed_run_ends_as_one_never_stopped(way, tiny_net, batches, tmp_path):
    """Rule, vote and seed come from the file, as plain numbers and strings: nothing in it is unpickled."""
    settings, memory = WAYS[way]
    torch.manual_seed(5)
    bits = 2 if memory == "half" else 3
    whole = Run(tiny_net(bits=bits, memory=memory, dropout=0.2), **settings)
    whole.train(batches[:3])
    whole.save(tmp_path / "run.safetensors", step=3, seen=[1, 2.5, "three"])
    whole.train(batches[3:])

    torch.manual_seed(6)
    resumed = Run(tiny_net(seed=1, bits=bits, memory=memory, dropout=0.2), seed=0)
    extra = resumed.load(tmp_path / "run.safetensors")
    resumed.train(batches[3:])

    assert extra == {"step": 3, "seen": [1, 2.5, "three"]}
    assert equal(resumed.snapshot(), whole.snapshot())
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] != 0.4
    assert resumed.optimizer.optimizers[0].flips() == whole.optimizer.optimizers[0].flips()
    assert resumed.optimizer.param_groups[0]["rule"] == settings["rule"]
    assert resumed.scheduler.last_epoch == 8


def test_checkpoint_of_a_model_alone_gives_the_model(tiny_net, tmp_path, rng_untouched):
    one, other = tiny_net(), tiny_net(seed=1)
    path = gft.save_checkpoint(tmp_path / "new" / "folder" / "model.safetensors", one)
    assert path.is_file()
    with rng_untouched():
        assert gft.load_checkpoint(path, other) == {}
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_torchs_generator_is_restored_for_training_and_left_alone_for_evaluation(run, tiny_net, tmp_path, rng_untouched):
    saved = torch.get_rng_state()
    path = run.save(tmp_path / "run.safetensors")
    torch.manual_seed(77)
    with rng_untouched():
        gft.load_checkpoint(path, tiny_net(seed=1))
    run.load(path)
    assert torch.equal(torch.get_rng_state(), saved)


# ---------------------------------------------------------------------------------------------------- older files


def rewritten(path: Path, change) -> Path:
    """A checkpoint as an older version would have written it: `change` edits the model's state_dict."""
    content = read_checkpoint(path)
    change(content["model"])
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps({key: flatten(value, key, tensors) for key, value in content.items()})
    save_file(tensors, path, {"format": FORMAT, "structure": text, "crc32": str(checksum(tensors, text))})
    return path


def test_checkpoint_of_a_time_before_spare_bits_is_read(tmp_path):
    """Packed 3-bit levels, [bits, memory] beside them and the fourth bit of each field unused."""
    levels = torch.randint(-3, 4, (5, 7))

    def age(state: dict) -> None:
        state["0.qweight"] = pack_fields(levels, 4, 3)
        state["0._extra_state"] = torch.tensor([3, 0], dtype=torch.uint8)

    path = gft.save_checkpoint(tmp_path / "old.safetensors", nn.Sequential(gft.QuantLinear(7, 5, 3, memory=False)))
    model = nn.Sequential(gft.QuantLinear(7, 5, 3, memory=False))
    gft.load_checkpoint(rewritten(path, age), model)
    assert torch.equal(model[0].levels().long(), levels)
    again = nn.Sequential(gft.QuantLinear(7, 5, 3, memory=False))
    gft.load_checkpoint(gft.save_checkpoint(path, model), again)
    assert torch.equal(again[0].qweight, model[0].qweight)


def test_checkpoint_of_a_time_before_gains_is_read(tmp_path):
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(gft.QuantLinear(7, 5, 4, gain=True, bias=True))

    def age(state: dict) -> None:
        del state["0.log_gain"]
        state["0._extra_state"] = torch.tensor([4, 1], dtype=torch.uint8)

    saved, model, x = build(1), build(2), torch.randn(3, 7)
    with torch.no_grad():
        model[0].log_gain.fill_(0.5)
    path = gft.save_checkpoint(tmp_path / "old.safetensors", saved)
    gft.load_checkpoint(rewritten(path, age), model)
    assert torch.equal(model[0].qweight, saved[0].qweight)
    assert torch.equal(model(x), saved(x))


def test_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, refuses):
    path = gft.save_checkpoint(tmp_path / "model.safetensors", nn.Sequential(gft.QuantLinear(8, 6, 4, memory=False)))
    others = {"only in the model": nn.Sequential(gft.QuantLinear(8, 6, 4, memory=False), nn.Linear(6, 2)),
              r"0\.qweight is torch\.uint8 of shape \(6, 4\)": nn.Sequential(gft.QuantLinear(8, 6, 4)),
              "4-bit weights": nn.Sequential(gft.QuantLinear(8, 6, 3, memory=False))}  # the same bytes, another meaning
    for match, model in others.items():
        before = [value.clone() for value in model.state_dict().values()]
        with refuses(ValueError, match):
            gft.load_checkpoint(path, model)
        assert equal(list(model.state_dict().values()), before)


@pytest.mark.parametrize("other", ["optimizer", "schedule", "later layer"])
def test_a_checkpoint_that_fits_in_part_changes_no_part(other, run, tiny_net, batches, tmp_path, refuses):
    """The ordinary case: the right model, and an optimizer with other groups."""
    path = run.save(tmp_path / "run.safetensors")
    mine = Run(tiny_net(seed=1, dropout=0.2))
    mine.train(batches[1:2])
    if other == "optimizer":
        mine.optimizer.release()
        mine.optimizer = gft.Hybrid(gft.GFT([{"params": [one]} for one in gft.quantized(mine.model)]),
                                    torch.optim.AdamW(gft.dense(mine.model)))
    elif other == "schedule":
        mine.scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, 3)
    else:
        rewritten(path, lambda state: state["block.mlp.2.scale"].fill_(math.nan))
    before = all_of(mine.model, mine.optimizer), mine.scheduler.state_dict(), torch.get_rng_state()
    said = {"optimizer": "param groups", "schedule": "StepLR", "later layer": "scales that are NaN"}
    with refuses(ValueError, said[other]):
        mine.load(path)
    assert same((all_of(mine.model, mine.optimizer), mine.scheduler.state_dict(), torch.get_rng_state()), before)


def test_checkpoint_of_a_time_when_the_sum_left_out_types_and_shapes_is_read(run, tmp_path):
    path = run.save(tmp_path / "run.safetensors", step=4)
    content, tensors = read_checkpoint(path), {}
    text = json.dumps({key: flatten(value, key, tensors) for key, value in content.items()})
    save_file(tensors, path, {"format": OLDER, "structure": text, "crc32": str(checksum(tensors, text, OLDER))})
    assert run.load(path) == {"step": 4}


def test_the_sum_knows_types_and_shapes():
    one = torch.arange(12, dtype=torch.int32)
    sums = {checksum({"a": tensor}, "") for tensor in (one, one.view(3, 4), one.view(torch.float32), one.view(torch.int8))}
    assert len(sums) == 4


def test_nests_too_deep_to_be_read_again_are_not_written(tmp_path, refuses):
    nest = []
    for _ in range(120):
        nest = [nest]
    with refuses(ValueError, "nested deeper than 100"):
        gft.save_checkpoint(tmp_path / "deep.safetensors", nn.Linear(2, 2), nest=nest)


# ---------------------------------------------------------------------------------------------------- what is missing


def test_checkpoint_without_optimizer_state_is_refused_for_an_optimizer(run, tmp_path, refuses):
    path = gft.save_checkpoint(tmp_path / "model.safetensors", run.model)
    before = run.snapshot()
    with refuses(CheckpointError, "holds no optimizer state"):
        run.load(path)
    assert equal(run.snapshot(), before)


def test_checkpoint_keeps_tied_tensors_tied(tmp_path):
    def build() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "mlp": gft.QuantLinear(6, 6), "head": nn.Linear(6, 11)})
        model["head"].weight = model["embed"].weight
        return model

    one, other = build(), build()
    gft.save_checkpoint(tmp_path / "tied.safetensors", one, same=[one["mlp"].scale, one["mlp"].scale])
    extra = gft.load_checkpoint(tmp_path / "tied.safetensors", other)
    assert torch.equal(other["head"].weight, one["embed"].weight)
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(extra["same"][0], extra["same"][1])


@pytest.mark.parametrize(("bits", "memory", "bytes_a_weight"), [(2, False, 0.25), (2, "half", 0.5), (3, False, 0.5),
                                                               (4, False, 0.5), (4, True, 1)])
def test_weights_take_their_bits_on_disk(bits, memory, bytes_a_weight, tmp_path):
    model = nn.Sequential(gft.QuantLinear(512, 256, bits, memory=memory))
    path = gft.save_checkpoint(tmp_path / "model.safetensors", model)
    weights = 512 * 256
    with safetensors.safe_open(path, framework="pt") as file:
        stored = file.get_tensor("model.0.qweight")
    assert stored.numel() * stored.element_size() == weights * bytes_a_weight
    rest = path.stat().st_size - weights * bytes_a_weight
    assert rest < 7000  # torch's generator takes 5056, names and structure the rest


# ---------------------------------------------------------------------------------------------------- damage


def flip(path: Path, place: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("where", [0.0, 0.37, 0.9999], ids=["first byte", "middle", "last byte"])
def test_flipped_byte_in_the_tensors_is_refused(where, run, tmp_path, refuses):
    path = run.save(tmp_path / "run.safetensors")
    before = run.snapshot()
    start = header_size(path)
    flip(path, start + int(where * (path.stat().st_size - start)), mask=0x10)
    with refuses(CheckpointError, "checksum does not match"):
        run.load(path)
    assert equal(run.snapshot(), before)


@pytest.mark.parametrize(("part", "flipped"), [("300", 0), ("pairs", 2), ("crc32", 1), ("gft-checkpoint-2", 4),
                                               ("shape", 0)],
                         ids=["the step", "the structure", "the checksum", "the format", "the shapes"])
def test_flipped_bit_in_the_header_is_refused(part, flipped, run, tmp_path):
    """The step, the schedule and the structure are as much a part of the run as its tensors."""
    path = run.save(tmp_path / "run.safetensors", step=300)
    before = run.snapshot()
    header = path.read_bytes()[: header_size(path)]
    flip(path, header.index(part.encode()) + flipped, mask=0x01)
    with pytest.raises(CheckpointError):
        run.load(path)
    assert equal(run.snapshot(), before)


def test_what_becomes_of_the_file_later_is_nothing_to_the_run(run, tmp_path):
    """safetensors maps files into memory: AdamW's moments were the file's own bytes."""
    path = run.save(tmp_path / "run.safetensors")
    run.load(path)
    before = all_of(run.model, run.optimizer)
    path.write_bytes(bytes(path.stat().st_size))
    assert same(all_of(run.model, run.optimizer), before)


@pytest.mark.parametrize("kept", [0, 5, 300, -1000, -1], ids="{} bytes".format)
def test_truncated_file_is_refused(kept, run, tmp_path, refuses):
    path = run.save(tmp_path / "run.safetensors")
    before = run.snapshot()
    path.write_bytes(path.read_bytes()[:kept])
    with refuses(CheckpointError, "damaged or cut short"):
        run.load(path)
    assert equal(run.snapshot(), before)


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "foreign"])
def test_file_that_is_no_checkpoint_is_refused(kind, run, tmp_path, refuses):
    path = tmp_path / "other.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("step 300, loss 1.5\n" * 40)
    elif kind == "foreign":
        save_file({"model.embed.weight": torch.zeros(24, 6)}, path)
    before = run.snapshot()
    match = {"text": "damaged", "foreign": "not a checkpoint of gft"}.get(kind, "no checkpoint at")
    with refuses(CheckpointError, match):
        run.load(path)
    assert equal(run.snapshot(), before)


@pytest.mark.parametrize("extra", [object(), {"deep": [1, {2, 3}]}, 1 + 2j], ids=["object", "set", "complex"])
def test_failing_write_leaves_the_old_file_whole(extra, run, tmp_path, refuses):
    path = run.save(tmp_path / "run.safetensors", step=1)
    old = path.read_bytes()
    with refuses(TypeError, "extra.bad.* holds a .* which a checkpoint cannot"):
        run.save(path, bad=extra)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_a_name_that_no_file_can_have_is_refused(refuses):
    with refuses(gft.UsageError, "no name holds a NUL"):
        gft.save_checkpoint("a\0b", torch.nn.Linear(1, 1))


def test_write_that_fails_on_disk_leaves_no_stray_file(run, tmp_path, refuses):
    path = tmp_path / "run.safetensors"
    path.mkdir()  # a file cannot be renamed over it
    with refuses(gft.UsageError, r"run\.safetensors cannot be written"):
        run.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]
    assert not any(path.iterdir())


def test_threads_that_save_to_one_path_leave_one_whole_file(tiny_net, tmp_path):
    path, models = tmp_path / "run.safetensors", [tiny_net(seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: gft.save_checkpoint(path, models[number % 4], number=number % 4), range(40)))
    loaded = tiny_net(seed=9)
    number = gft.load_checkpoint(path, loaded)["number"]
    assert equal(list(loaded.parameters()), list(models[number].parameters()))
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_save_replaces_the_old_file_and_moves_no_generator(run, batches, tmp_path, rng_untouched):
    path = run.save(tmp_path / "run.safetensors", step=1)
    run.train(batches[1:2])
    with rng_untouched():
        run.save(path, step=2)
    assert read_checkpoint(path)["extra"] == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


# ---------------------------------------------------------------------------------------------------- structure

leaves = st.one_of(st.none(), st.booleans(), st.integers(-2**70, 2**70), st.floats(allow_nan=False),
                   st.text(max_size=5),
                   st.lists(st.integers(-128, 127), max_size=4).map(lambda row: torch.tensor(row, dtype=torch.int8)),
                   st.floats(width=32, allow_nan=False).map(torch.tensor))
keys = st.one_of(st.integers(0, 3), st.sampled_from(["0", "1", "a", "b", "a.b", "a.0", "lr"]))
nests = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3),
), max_leaves=8)


@given(nests)
def test_flatten_and_unflatten_are_inverse(nest):
    tensors: dict[str, torch.Tensor] = {}
    structure = json.loads(json.dumps(flatten(nest, "extra", tensors)))
    assert same(unflatten(structure, tensors), nest)


@pytest.mark.parametrize("nest", [{"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
                                  {0: torch.tensor(1), "0": torch.tensor(2)}],
                         ids=["dotted key", "number and its string"])
def test_flatten_keeps_tensors_apart_whose_names_run_together(nest):
    tensors: dict[str, torch.Tensor] = {}
    structure = flatten(nest, "extra", tensors)
    assert same(unflatten(structure, tensors), nest)


def test_flatten_refuses_keys_it_could_not_give_back(tmp_path, refuses):
    with refuses(TypeError, r"the key \(1, 2\)"):
        gft.save_checkpoint(tmp_path / "model.safetensors", nn.Sequential(gft.QuantLinear(4, 3)), table={(1, 2): 3})
    assert not list(tmp_path.iterdir())


def test_structure_keeps_numbers_json_has_no_name_for(tmp_path):
    model = nn.Sequential(gft.QuantLinear(4, 3))
    gft.save_checkpoint(tmp_path / "model.safetensors", model, best=math.inf, worst=-math.inf, loss=math.nan, big=2**80)
    extra = gft.load_checkpoint(tmp_path / "model.safetensors", model)
    assert (extra["best"], extra["worst"], extra["big"]) == (math.inf, -math.inf, 2**80)
    assert math.isnan(extra["loss"])


TENSORS = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2**40),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_all_kinds_come_back(kind, tmp_path):
    model = nn.Sequential(gft.QuantLinear(4, 3))
    gft.save_checkpoint(tmp_path / "model.safetensors", model, tensor=TENSORS[kind])
    assert same(gft.load_checkpoint(tmp_path / "model.safetensors", model)["tensor"], TENSORS[kind])
