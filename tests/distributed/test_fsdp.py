"""sharding.py: ranks that share out the rows of integer weights (torch's fully_shard) train them as data-parallel ranks do.

Four gloo processes are spawned once; two of them also train as a group of their own. Each way is trained twice, whole and
shared out, and what comes out is compared bit for bit.
"""

import copy
import multiprocessing
from pathlib import Path
from unittest import mock

import no_warmup  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gft
from gft import votes
from gft.lab import traffic
from gft.layers import quantized_layers
from gft.philox import NoiseKey
from gft.sharding import all_rows, own_rows, scatter_of

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="fully_shard takes no integers before torch 2.12")
WORLD, STEPS, SAVED = 4, 4, 2
# 25 rows are 7, 7, 7 and 4; 3 are 1, 1, 1 and none.
SHAPES = ((6, 25), (25, 24), (24, 3), (3, 5))

# Settings, and the form of the weights: neither default nor zero.
WAYS = {
    "memory": ({"rule": gft.Rounding(inertia=0.7, warmup=2), "lr": 0.3}, {"bits": 4, "memory": True}),
    "signs": ({"rule": gft.Rounding(inertia=0.7), "lr": 0.3, "vote": gft.Sign()}, {"bits": 2, "memory": True, "gain": True}),
    "packed": ({"rule": gft.Rounding(threshold=0.9, second_moment="running", warmup=2), "lr": 0.5},
               {"bits": 2, "memory": False}),
    "momentum": ({"rule": gft.Rounding(momentum=0.8), "lr": 0.9, "vote": gft.Sign()}, {"bits": 3, "memory": True}),
    "spare bits": ({"rule": gft.Rounding(threshold=0.4), "lr": 0.5, "vote": gft.Int4()}, {"bits": 3, "memory": False}),
    "topk": ({"rule": gft.TopK(p_min=0.02), "lr": 0.4}, {"bits": 3, "memory": False}),
}

RESUMED = ("signs", "momentum")  # by signs, whose sums depend on no rank's scale


def net(bits: int, memory: bool, gain: bool = False, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(*shape, bias=number == 1) for number, shape in enumerate(SHAPES)]
    return gft.quantize_(nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))), bits, memory=memory,
                         gain=gain)


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Blocks, and what is left over, as one would write it."""
    fully_shard(model[2], mesh=mesh)
    fully_shard(model[4], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 5, generator=generator)


def train(model: nn.Module, own: gft.GFT, steps, parts: tuple[int, ...], micro_batches: int = 1) -> None:
    for step in steps:
        own.zero_grad()
        for micro in range(micro_batches):
            x, y = (each.split(parts)[own.ranks.rank] for each in batch(step, micro))
            (model(x) - y).square().sum().backward()
        own.step()


def optimizer_of(model: nn.Module, way: str, group=None, **settings) -> gft.GFT:
    return gft.GFT(gft.quantized(model), **{"seed": 5, **WAYS[way][0], **settings}, process_group=group)


def end_of(model: nn.Module, own: gft.GFT) -> dict:
    """All that must be the same whole and shared out."""
    found = {"flips": own.flips()}
    for number, weight in enumerate(gft.quantized(model)):
        found |= {f"{number}.{name}": all_rows(value).clone() if isinstance(value, torch.Tensor) else value
                  for name, value in own.state[weight].items()}
        found[f"{number}.weight"] = all_rows(weight).clone()
    return found


def trained(way: str, mesh: DeviceMesh | None, parts=(4,) * WORLD, micro_batches=1, group=None, **settings) -> dict:
    model = net(**WAYS[way][1])
    model = model if mesh is None else sharded(model, mesh)
    own = optimizer_of(model, way, group, **settings)
    train(model, own, range(STEPS), parts, micro_batches)
    return end_of(model, own)


def compared(way: str, mesh: DeviceMesh, **rest) -> tuple[dict, dict]:
    return trained(way, mesh, **rest), trained(way, None, **rest)


# ---------------------------------------------------------------------------------------------------- what ranks run


def scenarios(rank: int, folder: Path) -> dict:
    mesh, result = init_device_mesh("cpu", (WORLD,)), {}
    for way in WAYS:
        result[way] = compared(way, mesh)
    result["uneven"] = compared("memory", mesh, parts=(1, 0, 5, 10))
    result["micro-batches"] = compared("packed", mesh, micro_batches=3)
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    result["two copies"] = compared("memory", copies)
    pair = dist.new_group([0, 1])
    if rank < 2:
        two = DeviceMesh.from_group(pair, "cpu")
        result["two ranks"] = compared("packed", two, parts=(6, 10), group=pair)
        result["two ranks, signs"] = compared("signs", two, parts=(6, 10), group=pair)
        for way in RESUMED:
            save_two_steps(way, two, pair, folder)
    dist.barrier()
    result["resumed"] = {way: resumed(way, mesh, folder) for way in RESUMED}
    result["in backward"] = trained("signs", mesh, (3, 3, 8, 2), 2, in_backward=True)
    result["in backward, uneven"] = trained("signs", mesh, (6, 0, 8, 2), 2, in_backward=True)
    rule = gft.Rounding(inertia=0.7, orthogonalize=True)
    result["orthogonalize"] = compared("memory", mesh, rule=rule)
    result["hybrid"] = hybrid(mesh, folder)
    result["saturated"] = saturated(rank, mesh)
    result["fresh"] = fresh(rank, mesh)
    result["refused"] = refused(mesh, copies, folder)
    result["sent"] = {wire: sent(mesh, wire) for wire in ("int32", "int8")}
    result["as bytes"] = as_bytes(rank, mesh)
    result["copies, as bytes"] = {wire: own_rows_of_copies(copies, wire) for wire in ("int32", "int8")}
    single = dist.new_group([0])
    if rank == 0:
        result["one rank"] = trained("signs", DeviceMesh.from_group(single, "cpu"), (16,), group=single)
    return result


class Sent(TorchDispatchMode):
    """How many bytes this rank sends, by collective, if each goes round in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"allgather": 0.0, "reduce_scatter": 0.0, "alltoall": 0.0, "allreduce": 0.0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in self.bytes:
            if "c10d" in str(func) and kind in str(func):
                first = next(tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor))  # the whole
                size = first.nbytes * (WORLD - 1) / WORLD
                self.bytes[kind] += 2 * size if kind == "allreduce" else size
        return func(*args, **(kwargs or {}))


def sent(mesh: DeviceMesh, wire: str) -> dict:
    torch.manual_seed(0)
    model = gft.quantize_(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), 2, memory=False, gain=False)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = gft.GFT([{"params": gft.quantized(model), "wire": wire}])
    for _ in range(2):
        own.zero_grad()
        with Sent() as log:
            model(torch.randn(4, 64)).square().sum().backward()
            own.step()
    return log.bytes


def many_votes(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(25, 17, generator=generator) * (20, 1000, 5e5, 3e7)[rank]).int()


def as_bytes(rank: int, mesh: DeviceMesh) -> dict:
    """Votes of four sizes, sent many times, and votes that a byte holds."""
    scatter = scatter_of(distribute_tensor(torch.zeros(25, 17), mesh, [Shard(0)]))
    each = [scatter(many_votes(rank), NoiseKey(1, step, 2, rank)) for step in range(60)]
    small = torch.randint(-127, 128, (25, 17), generator=torch.Generator().manual_seed(rank)).int()
    return {"once": each[0], "mean": torch.stack(each).double().mean(0), "small": small,
            "small, shared out": scatter(small, NoiseKey(1, 0, 2, rank))}


def own_rows_of_copies(mesh: DeviceMesh, wire: str) -> list[torch.Tensor]:
    model = sharded(net(4, True), mesh)
    own = gft.GFT([{"params": gft.quantized(model), "wire": wire}], lr=0.3)
    train(model, own, range(2), (4,) * WORLD)
    return [own_rows(weight).clone() for weight in gft.quantized(model)]


def state_of(model: nn.Module, own: gft.GFT, dense: torch.optim.Optimizer | None = None) -> dict:
    state = {"model": get_model_state_dict(model), "gft": own}
    return state if dense is None else {**state, "dense": get_optimizer_state_dict(model, dense)}


def save_two_steps(way: str, mesh: DeviceMesh, group, folder: Path) -> None:
    model = sharded(net(**WAYS[way][1]), mesh)
    own = optimizer_of(model, way, group)
    train(model, own, range(SAVED), (6, 10))
    dcp.save(state_of(model, own), checkpoint_id=folder / way, process_group=group)


def on_meta(way: str) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(part for number, shape in enumerate(SHAPES)
                                for part in (nn.Linear(*shape, bias=number == 1), nn.Tanh())))
    return gft.quantize_(model, **{"gain": False, **WAYS[way][1]}, init="variance")


def load(folder: Path, model: nn.Module, own: gft.GFT, dense: torch.optim.Optimizer | None = None, **options) -> None:
    state = state_of(model, own, dense)
    dcp.load(state, checkpoint_id=folder, **options)
    set_model_state_dict(model, state["model"])
    if dense is not None:
        set_optimizer_state_dict(model, dense, state["dense"])


def resumed(way: str, mesh: DeviceMesh, folder: Path) -> dict:
    """What two ranks have saved four go on with, in a model that has had no values before."""
    model = sharded(on_meta(way), mesh).to_empty(device="cpu")
    own = optimizer_of(model, way, lr=0.9, seed=8)
    load(folder / way, model, own)
    train(model, own, range(SAVED, STEPS), (3, 3, 8, 2))
    return end_of(model, own)


def hybrid(mesh: DeviceMesh, folder: Path) -> dict:
    """Gains, biases and a norm by AdamW, sharded as well; and a look at the weights between the steps."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))
    gft.quantize_(model, 2, memory=False)
    for number in (0, 3):
        fully_shard(model[number], mesh=mesh)
    fully_shard(model, mesh=mesh)
    own, dense = gft.GFT(gft.quantized(model), lr=0.3), torch.optim.AdamW(gft.dense(model), lr=2e-2)
    both, losses = gft.Hybrid(own, dense), []
    x, y = batch(0)
    rank = dist.get_rank()
    x, y = x[4 * rank : 4 * rank + 4], (x[:, :5] * 2)[4 * rank : 4 * rank + 4]
    for step in range(25):
        both.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        both.step()
        losses.append(loss.item())
        if step == 10:  # the outermost module keeps what it has gathered, and its optimizer finds it all the same
            model.eval()(x).sum().item()
            own.load_state_dict(own.state_dict())
            model.train()
    seen = gft.statistics(model, own)
    weight = model[0].weight  # gathered, gain and all
    with torch.no_grad():
        model[0].unshard()
        same_weight = torch.equal(weight, model[0].weight)
        model[0].reshard()
    dcp.save(state_of(model, own, dense), checkpoint_id=folder / "hybrid")
    before = copy.deepcopy(_tensors({**state_of(model, own, dense), "gft": own.state_dict()}))
    train(model, own, range(1), (4,) * WORLD)
    dense.step()
    load(folder / "hybrid", model, own, dense)
    after = _tensors({**state_of(model, own, dense), "gft": own.state_dict()})
    same = {name: torch.equal(own_rows(one), own_rows(after[name])) for name, one in before.items()}
    return {"losses": losses, "restored": {**same, "weight": same_weight}, "edges": seen["3"]["edges"],
            "gain": model[0].log_gain.full_tensor().item()}


def _tensors(state, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {found: tensor for key, item in items for found, tensor in _tensors(item, f"{name}.{key}").items()}


def saturated(rank: int, mesh: DeviceMesh) -> dict:
    """Votes on the first layer, whole and shared out, with a bound that they exceed."""
    found = {}
    for name, model in (("whole", net(4, True)), ("rows", sharded(net(4, True), mesh))):
        optimizer = optimizer_of(model, "memory")
        with mock.patch.object(votes, "INT32_BOUND", 400):
            for micro in range(3):
                x, y = (each.chunk(WORLD)[rank] for each in batch(0, micro))
                (model(x) - y).square().sum().backward()
                found[name, micro] = model[0].votes.votes.clone()
        del optimizer
    return found


def fresh(rank: int, mesh: DeviceMesh) -> dict:
    model = sharded(on_meta("memory"), mesh).to_empty(device="cpu")
    torch.manual_seed(rank)
    for layer in quantized_layers(model).values():
        layer.reset_parameters()
    starts = [layer.levels() for layer in quantized_layers(model).values()]
    own = optimizer_of(model, "memory")
    train(model, own, range(1), (4,) * WORLD)
    return {"starts": starts, "scales": [layer.scale for layer in quantized_layers(model).values()], "flips": own.flips(),
            "bias": model[2].bias.full_tensor().abs().max().item()}


def refused(mesh: DeviceMesh, copies: DeviceMesh, folder: Path) -> dict:
    model, other = sharded(net(4, True), mesh), sharded(net(4, True), copies)
    own = optimizer_of(model, "memory")
    tries = {
        "alone": lambda: gft.GFT(gft.quantized(other), process_group=False),
        "two meshes": lambda: gft.GFT(gft.quantized(sharded(net(4, True), mesh)) + gft.quantized(other)),
        "a part": lambda: model[0](torch.zeros(1, 6)),
        "one file": lambda: gft.save_checkpoint(folder / "one-file", model),
        "from one file": lambda: gft.load_checkpoint(folder / "one-file", model),
        "quantize": lambda: gft.quantize_(fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)),
        "by torch's own": lambda: set_optimizer_state_dict(model, own, get_optimizer_state_dict(model, own)),
        "dequantize": lambda: gft.dequantize_(model),
        "whole, as bytes": lambda: gft.GFT([{"params": gft.quantized(net(4, True)), "wire": "int8"}]),
        "another wire": lambda: gft.GFT([{"params": gft.quantized(net(4, True)), "wire": "int4"}]),
        "momentum": lambda: gft.GFT(gft.quantized(model), rule=gft.Rounding(momentum_rank=2)),
        "whole, in backward": lambda: gft.GFT(gft.quantized(net(4, True)), in_backward=True),
    }
    return {name: error_of(function) for name, function in tries.items()}


def error_of(function) -> str:
    try:
        function()
    except gft.UsageError as error:
        return str(error)
    return ""


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    torch.save(scenarios(rank, Path(folder)), f"{folder}/result-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What each rank has found."""
    # One server imports torch, and ranks fork from it: to import it is half of the work here.
    multiprocessing.set_forkserver_preload(["gft", "gft.lab.traffic", "torch.distributed.checkpoint.state_dict",
                                            "torch.distributed.fsdp"])
    mp.start_processes(worker, (str(folder),), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(WORLD)]


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


# ---------------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("scenario", [*WAYS, "uneven", "micro-batches", "two ranks", "two copies"])
def test_shared_out_weights_move_as_whole_ones_do(scenario, ranks):
    for result in ranks[: 2 if scenario == "two ranks" else WORLD]:
        shared_out, whole = result[scenario]
        assert whole["flips"] > 0
        assert_equal(shared_out, whole)
        assert_equal(shared_out, ranks[0][scenario][0])


def alone(way: str = "signs", **settings) -> dict:
    return trained(way, None, parts=(16,), **settings)


def test_one_two_and_four_ranks_end_in_the_same_bits(ranks):
    """By signs, whose sums depend on no rank's scale."""
    for result in ranks:
        for end in result["signs"] + result.get("two ranks, signs", ()):
            assert_equal(end, alone())


@pytest.mark.parametrize("way", RESUMED)
def test_four_ranks_go_on_from_the_checkpoint_of_two(way, ranks):
    for result in ranks:
        assert_equal(result["resumed"][way], alone(way))


@pytest.mark.parametrize("way", RESUMED)
def test_one_process_goes_on_from_the_checkpoint_of_two_ranks(way, ranks, folder):
    model = net(**WAYS[way][1], seed=9)
    own = optimizer_of(model, way, lr=0.9, seed=8)
    load(folder / way, model, own, no_dist=True)
    train(model, own, range(SAVED, STEPS), (16,))
    assert_equal(end_of(model, own), alone(way))


def test_weights_move_in_backward_as_those_of_one_process(ranks):
    whole = alone(micro_batches=2, in_backward=True)
    for result in ranks:
        assert_equal(result["in backward"], whole)
        assert_equal(result["in backward, uneven"], whole)


def test_ranks_orthogonalize_whole_matrices_in_turns(ranks):
    for result in ranks:
        shared_out, whole = result["orthogonalize"]
        assert shared_out["flips"] > 0
        assert_equal(shared_out, ranks[0]["orthogonalize"][0])
        same, unlike = (torch.cat([(shared_out[key] == other[key]).flatten().float() for key in whole
                                   if key.endswith(".weight")]).mean() for other in (whole, result["memory"][1]))
        assert same > 0.98  # a float rounded otherwise may move a weight
        assert unlike < 0.9


def test_votes_that_int32_may_not_hold_are_saturated(ranks):
    """The bound is 400, so each of four ranks may bring 99 and all together, over several backward passes, 399."""
    found = [result["saturated"] for result in ranks]
    total = torch.zeros(25, 6, dtype=torch.int64)
    previous = [torch.zeros(25, 6, dtype=torch.int64) for _ in ranks]
    for micro in range(3):
        now = [one["whole", micro].long() for one in found]  # int64, exact, of all backward passes so far
        own = [new - old for new, old in zip(now, previous, strict=True)]
        previous = now
        assert max(int(one.abs().max()) for one in own) > 99
        total = (total + sum(one.clamp(-99, 99) for one in own)).clamp(-399, 399)
        rows = torch.cat([one["rows", micro] for one in found])
        assert rows.dtype == torch.int32
        assert torch.equal(rows.long(), total)


def test_one_rank_runs_the_same_code(ranks):
    assert_equal(ranks[0]["one rank"], alone())


def test_ranks_send_what_the_table_in_the_documentation_says(ranks):
    for wire, collective, a_row in (("int32", "reduce_scatter", 0), ("int8", "alltoall", 1)):
        expected = traffic.sent(traffic.gft_scheme(2, False, wire=wire), traffic.Setup("", 3 * 64**2, (64, 64), WORLD))
        for result in (result["sent"][wire] for result in ranks):
            assert result["allgather"] == expected["gathered"]
            assert result["alltoall"] + result["reduce_scatter"] == result[collective]
            assert result[collective] == expected["reduced"] + 3 * 64 * a_row * (WORLD - 1) / WORLD
            assert expected["small"] < result["allreduce"] < expected["small"] + 1000  # and counts of tokens and flips


def test_votes_that_travel_as_bytes_are_right_on_average(ranks):
    found = [result["as bytes"] for result in ranks]
    exact, once, mean = (torch.cat(each) if isinstance(each, list) else each for each in (
        sum(many_votes(rank).double() for rank in range(WORLD)), [one["once"].double() for one in found],
        [one["mean"] for one in found]))
    error, bias = ((each - exact).norm() / exact.norm() for each in (once, mean))
    assert 0 < error < 0.02
    assert bias < error / 5  # of 60
    assert torch.equal(torch.cat([one["small, shared out"] for one in found]), sum(one["small"] for one in found))


def test_copies_stay_equal_whichever_way_votes_travel(ranks):
    for one, other in ((0, 2), (1, 3)):
        for wire in ("int32", "int8"):
            pairs = zip(ranks[one]["copies, as bytes"][wire], ranks[other]["copies, as bytes"][wire], strict=True)
            assert all(torch.equal(mine, copied) for mine, copied in pairs)
    exact, rounded = (torch.cat([rows.flatten() for rows in rows_of]) for rows_of in ranks[0]["copies, as bytes"].values())
    assert 0.8 < (exact == rounded).float().mean() < 1


# ---------------------------------------------------------------------------------------------------- with the rest of torch


def test_a_hybrid_learns_and_its_checkpoint_restores_both_parts(ranks):
    losses = torch.tensor([result["hybrid"]["losses"] for result in ranks]).mean(0)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    for result in ranks:
        assert len(result["hybrid"]["restored"]) > 20
        assert [name for name, same in result["hybrid"]["restored"].items() if not same] == []
        assert result["hybrid"]["gain"] == ranks[0]["hybrid"]["gain"] != 0
        assert 0 < result["hybrid"]["edges"] < 1


def test_a_model_from_the_meta_device_starts_alike_on_all_ranks(ranks):
    for result in (result["fresh"] for result in ranks):
        for name in ("starts", "scales"):
            for one, other in zip(result[name], ranks[0]["fresh"][name], strict=True):
                assert torch.equal(one, other)
        assert all(len(start.unique()) > 5 for start in result["starts"])
        assert result["flips"] > 0
        assert result["bias"] == 0


def test_what_cannot_work_says_what_to_do(ranks):
    for result in (result["refused"] for result in ranks):
        assert "process_group=mesh.get_group()" in result["alone"]
        assert "the same mesh for all" in result["two meshes"]
        assert "the module that fully_shard was given" in result["a part"]
        assert "torch.distributed.checkpoint" in result["one file"]
        assert "before fully_shard" in result["from one file"]
        assert "give the optimizer itself" in result["by torch's own"]
        assert "gft.quantize_ before it" in result["quantize"]
        assert "a model that is whole" in result["dequantize"]
        assert "in_backward=True" in result["whole, in backward"]
        assert "momentum_rank=2 looks at whole matrices" in result["momentum"]
        assert "is for weights that fully_shard" in result["whole, as bytes"]
        assert "wire='int4'" in result["another wire"]
