"""GFT, the optimizer of integer weights, and Hybrid, which joins it with any other torch optimizers.

GFT hands each weight a ballot (vote.py); backward fills it with votes; `step` lets a rule (step.py) turn the votes into
moves. There is no other state than running scales: one float a feature for x and delta, and with memory one for their votes.
On several ranks `step` first makes all of it the same on each (distributed.py).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft import kernels
from gft import step as rules
from gft.directions import CEILING
from gft.distributed import ALONE, Ranks, check_alike, even_out_over, fingerprint, ranks_of, unite
from gft.grid import Grid
from gft.philox import noise16
from gft.vote import CODES, MASKS, SAMPLES, Ballot, renew

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RULES = ("rounding", "topk")
SIZES = ("step", "running")
DIRECTIONS = ("voted", "even")

# The paper's algorithm, as docs/paper.md reads it: k = 0.75 falling linearly to 0 (by a scheduler), one voice a sample.
PAPER: Mapping[str, Any] = MappingProxyType({"lr": 0.75, "rule": "topk", "vote": "sign", "sample": "sequence",
                                             "mask": "none", "p_min": 0.001})

# Elements a rule works on at once: on the CPU its dozen passes stay in the cache, on a GPU its scratch stays bounded.
AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}
RUNNING = ("x_rms", "delta_rms", "votes_square")
GPU_STEPS_BETWEEN_REPORTS = 100


class GFT(Optimizer):
    """Trains the integer weights of `gft.quantized(model)` by votes.

    lr: For rule "rounding" the rms move of a weight a step, in levels, for a 4-bit layer of 128 inputs; other bits,
        widths and starts are scaled so that the same lr suits them (step.levels_a_step). At 0 nothing moves; near 1 a weight
        crosses the grid in a few steps and training never settles. Weights without memory take half of it.
        For rule "topk" it is the paper's k, the fraction of weights that may move: at 0 none, at 1 all. Let a scheduler
        bring it to 0 in both.
    rule: "rounding" (every weight moves by the stochastic rounding of its share) or "topk" (the paper's).
    vote: "int8", "int4", "ternary" (unbiased small integers) or "sign" (the paper's, free of the error's size).
    sample: who has a voice when vote is "sign": each "token", or each "sequence" (sign of the sum over its tokens).
    mask: "literal" counts only what line 9 of Algorithm 1 prints; weights can then only grow. "none" counts all.
    inertia: For rule "rounding" with memory: the share of levels that wait in a step before they follow where their votes
        have carried them. It does what momentum does, without its state. At 0 every level follows at once, memory
        counts twice as finely, and large networks are held to small lr; near 1 levels lag far behind; 1 would never move.
        Weights without memory have none.
    quorum: For rule "rounding" without memory: votes below quorum · a rms are not heard, where a is the spacing of the grid
        that values move on (1.22 at 2 bits, 0.35 at 4, and at 3, where they move by halves). At 0 all are, and at 2 bits
        noise moves more weights than the votes' mean does. Higher ones move fewer weights: some
        long trainings gained by that, short ones are too slow then. 3 rms is the most (8.5 at 4 bits).
    sizes: For rule "rounding" without memory: a vote is measured by how loud its row and its column are, in this "step"
        alone, or in a "running" mean over many steps, as with memory. The step as a whole is measured by itself in
        either case, so that a quorum keeps its meaning.
    directions: "voted" takes a layer's votes as they were cast. "even" makes all directions of that matrix half as loud as
        they are and half equally loud (directions.py), as Muon does with a gradient: learns faster where a step has many
        tokens, costs products of the layer's size cubed, and devices no longer give the same bits (ranks do: each evens
        out some of the layers for all).
    p_min: topk's least chance of a chosen weight to move. At 0 the weakest candidates never move; at 1 every candidate
        moves each step and training never settles.
    seed: of all random numbers; equal seeds, votes and steps give equal weights on every device.
    in_backward: True moves each layer's weights as soon as its votes exist, inside backward, and keeps no votes;
        `step` then only counts. Each micro-batch moves the weights by itself. For a single process only.
    process_group: the processes whose votes are summed before weights move. None: torch's default group if there is one,
        else this process alone; False: alone in any case. All ranks then take the same steps, to the same bits, and must
        take equally many. It is kept in no state_dict: what n ranks have saved m can load. In the first step each rank
        still rounds x and delta on the scale of its own first batch; from then on they share one.
    """

    _process_group: "ProcessGroup | bool | None" = None
    ranks: Ranks = ALONE

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rule: str = "rounding", vote: str = "int8", *,
                 sample: str = "token", mask: str = "none", inertia: float = 0.9, quorum: float = 1.6,
                 sizes: str = "step", directions: str = "voted", p_min: float = 0.001, seed: int = 0,
                 in_backward: bool = False, process_group: "ProcessGroup | bool | None" = None) -> None:
        self._process_group, self.ranks = process_group, ranks_of(process_group)
        defaults = {"lr": lr, "rule": rule, "vote": vote, "sample": sample, "mask": mask, "inertia": inertia,
                    "quorum": quorum, "sizes": sizes, "directions": directions, "p_min": p_min, "seed": seed,
                    "in_backward": in_backward, "step": 0}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group, "step": 0}
        check_settings(settings, self.ranks)
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for one in params:
            weight = one[1] if isinstance(one, tuple) else one
            if not isinstance(weight, Tensor):
                raise TypeError(f"GFT takes parameters, not {type(weight).__name__}; pass gft.quantized(model)")
            if not isinstance(getattr(weight, "grid", None), Grid):
                raise TypeError(f"GFT trains quantized weights, but was given a {weight.dtype} tensor of shape "
                                f"{tuple(weight.shape)}; pass gft.quantized(model), and gft.dense(model) to AdamW")
        super().add_param_group({**settings, "params": params})
        self._attach(self.param_groups[-1])

    def _attach(self, group: dict[str, Any]) -> None:
        """Hand a ballot to each weight of a group, with what state there is."""
        self._reported = self._unreported = 0
        self._compared = False  # with the other ranks
        if not all(isinstance(getattr(weight, "grid", None), Grid) for weight in group["params"]):
            raise ValueError("a deep copy of weights does not say how they are stored; build a new optimizer from "
                             "gft.quantized(model) and give it this one's state_dict")
        for weight in group["params"]:
            # A weight's number in the random streams: how many there were before it.
            state = self.state[weight]
            state.setdefault("layer", len(self.state) - 1)
            weight.ballot = Ballot(
                **{key: group[key] for key in ("vote", "sample", "mask", "seed", "step")}, layer=state["layer"],
                rank=self.ranks.rank, world=self.ranks.world,
                **{which: state.get(which) for which in RUNNING},
                on_votes=self._move_in_backward if group["in_backward"] else None)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle. A group cannot be pickled: whoever reads this goes on in the default one, or alone if it was alone."""
        return {**super().__getstate__(), "_process_group": False if self._process_group is False else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also the last act of load_state_dict
        self.ranks = ranks_of(self._process_group)
        for group in self.param_groups:  # a state_dict of before a setting was there
            group.setdefault("sizes", "step")
            group.setdefault("directions", "voted")
        self.check()
        for group in self.param_groups:
            self._attach(group)

    def check(self) -> None:
        """Raise if a group's settings, which a scheduler or a user may have changed, make no sense."""
        for group in self.param_groups:
            check_settings(group, self.ranks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the votes cast since the last step."""
        for weight in self._all_weights():
            weight.ballot.discard()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move the weights by the votes cast since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check()
        self._unite()
        for group in self.param_groups:
            if not group["in_backward"]:
                _move_some([weight for weight in group["params"] if weight.ballot.votes is not None], group, self.ranks)
            renew([weight.ballot for weight in group["params"]])
            for weight in group["params"]:
                self.state[weight].update({which: getattr(weight.ballot, which) for which in RUNNING
                                           if getattr(weight.ballot, which) is not None})
            self._count_flips(group)
            _advance(group)
        self._report_not_finite()
        return loss

    def _unite(self) -> None:
        """Take the votes of the other ranks in, if there are any."""
        if ranks_of(self._process_group) != self.ranks:
            raise ValueError("torch.distributed was initialised or ended after this optimizer was made; make gft.GFT after "
                             "init_process_group, or pass process_group=False to train alone")
        if self.ranks.world == 1:
            return
        weights = self._all_weights()
        if not self._compared:
            settings = [{key: group[key] for key in self.defaults if key in group} for group in self.param_groups]
            check_alike(self.ranks, fingerprint(weights, settings), weights[0].device)
            self._compared = True
        unite(weights, [self.state[weight] for weight in weights], self.ranks)

    def _report_not_finite(self) -> None:
        """Warn when more errors were NaN or inf than at the last look. On a GPU a look waits for it, so it is rare; while a
        CUDA graph is captured there is none: then ask `not_finite()` now and then."""
        self._unreported += 1
        on_cpu = all(weight.device.type == "cpu" for weight in self._all_weights())
        if not on_cpu and (self._unreported < GPU_STEPS_BETWEEN_REPORTS or torch.cuda.is_current_stream_capturing()):
            return
        self._unreported = 0
        count = self.not_finite()
        if count > self._reported:
            warnings.warn(f"{count - self._reported} errors (values of delta) were NaN or inf and cast no vote; lower the "
                          "loss scale or the dense learning rate", stacklevel=4)
        self._reported = count

    @torch.no_grad()
    def _move_in_backward(self, weight: Tensor) -> None:
        group = next(group for group in self.param_groups if any(weight is other for other in group["params"]))
        check_settings(group, self.ranks)
        ballot: Ballot = weight.ballot  # type: ignore[attr-defined]
        _move_some([weight], group, self.ranks, call=ballot.batches - 1)
        ballot.drop_votes()
        if ballot.flips is not None:  # until the step; the scratch it may be a view of should not live as long
            ballot.flips = ballot.flips.clone()

    def _count_flips(self, group: dict[str, Any]) -> None:
        """Take the step's flips over from the ballots. In place, as all state is renewed: a captured CUDA graph writes where
        it wrote when it was captured. All layers in one launch or two, where there are launches."""
        moved = []
        for weight in group["params"]:
            state, flips = self.state[weight], weight.ballot.flips
            if flips is not None:
                for name in ("flips", "last_flips"):
                    if name not in state:  # not setdefault, which would launch a fill each time
                        state[name] = torch.zeros_like(flips)
                moved.append((flips, state["flips"], state["last_flips"]))
            elif "last_flips" in state:
                state["last_flips"].zero_()
            weight.ballot.flips = None
        if moved:
            fresh, so_far, last = (list(each) for each in zip(*moved, strict=True))
            torch._foreach_add_(so_far, fresh)
            torch._foreach_copy_(last, fresh)

    def _all_weights(self) -> list[Any]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """torch's, with numbers in the groups also where a GPU counts the steps."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group["step"] = int(group["step"])
        return state

    def flips(self) -> int:
        """How many times a weight changed its level since the start: the paper's "updates", counted."""
        return int(sum(int(self.state[weight].get("flips", 0)) for weight in self._all_weights()))

    def not_finite(self) -> int:
        """How many errors (values of delta) were NaN or inf and cast no vote since this optimizer was made, on this rank."""
        counts = (weight.ballot.not_finite for weight in self._all_weights())
        return sum(int(count) for count in counts if count is not None)


def _advance(group: dict[str, Any]) -> None:
    """Count a step where its random numbers are drawn: on a GPU in its memory, so that a captured CUDA graph, which runs no
    Python, counts too."""
    clocks: dict[torch.device, int | Tensor] = {}
    for weight in group["params"]:
        if weight.device not in clocks:
            step = weight.ballot.step
            if isinstance(step, Tensor) and step.device == weight.device:
                step.add_(1)
            else:
                step = int(step) + 1
                step = torch.tensor(step, device=weight.device) if weight.is_cuda else step
            clocks[weight.device] = step
        weight.ballot.step = clocks[weight.device]
    group["step"] = next(iter(clocks.values()), group["step"])


def check_settings(group: Mapping[str, Any], ranks: Ranks = ALONE) -> None:
    """Raise a one-sentence ValueError for a setting no rule can work with. Called before any weight moves."""
    for key, choices in (("rule", RULES), ("vote", tuple(CODES)), ("sample", SAMPLES), ("mask", MASKS), ("sizes", SIZES),
                         ("directions", DIRECTIONS)):
        if group[key] not in choices:
            raise ValueError(f"{key}={group[key]!r}: choose one of {', '.join(choices)}")
    lr = 0.0 if _on_gpu(group["lr"]) else float(group["lr"])  # to look would make the host wait
    if not (math.isfinite(lr) and 0 <= lr <= 1):
        what = "k, the fraction of weights that may move" if group["rule"] == "topk" else "the rms move in levels"
        raise ValueError(f"lr={lr}: for rule {group['rule']!r} lr is {what}; give a number from 0 to 1")
    if not 0 <= group["inertia"] < 1:
        raise ValueError(f"inertia={group['inertia']}: the share of levels that wait in a step is 0 or more and less than 1")
    if not (math.isfinite(group["quorum"]) and group["quorum"] >= 0):
        raise ValueError(f"quorum={group['quorum']}: a number of grid spacings, 0 or more")
    if not 0 <= group["p_min"] <= 1:
        raise ValueError(f"p_min={group['p_min']}: a chance lies between 0 and 1")
    if not (isinstance(group["seed"], int) and 0 <= group["seed"] < 2**64):
        raise ValueError(f"seed={group['seed']!r}: give an integer from 0 to 2^64 - 1")
    if group["in_backward"] and ranks.world > 1:
        raise ValueError("in_backward=True moves a layer before the votes of other ranks are there; leave it out, or pass "
                         "process_group=False to train alone")


def _on_gpu(number: Any) -> bool:
    return isinstance(number, Tensor) and number.is_cuda


def _move_some(weights: Sequence[Any], group: dict[str, Any], ranks: Ranks, call: int = 0) -> None:
    """One step of some weights of a group, by their votes."""
    if group["directions"] == "even":
        evened = even_out_over(ranks, [weight.ballot.votes for weight in weights])
        for weight, votes in zip(weights, evened, strict=True):
            weight.ballot.revise(votes, CEILING)
    moves(weights, call, **{key: group[key] for key in ("lr", "rule", "p_min", "inertia", "quorum", "sizes")})


def moves(weights: Sequence[Any], call: int, *, lr: float | Tensor, rule: str, p_min: float, inertia: float,
          quorum: float, sizes: str) -> None:
    """`move` of weights that share seed and step: rule "rounding" on a GPU takes them together, all others one by one."""
    together: dict[torch.device, list[Any]] = {}
    may_join = rule == "rounding" and (_on_gpu(lr) or lr > 0)
    for weight in weights:
        if may_join and kernels.joint_of(weight) is not None:
            together.setdefault(weight.device, []).append(weight)
        else:
            move(weight, weight.ballot, call, lr=lr, rule=rule, p_min=p_min, inertia=inertia, quorum=quorum, sizes=sizes)
    for some in together.values():
        _round_together(some, call, lr, rules.follow_of(inertia), quorum, sizes)


def _round_together(weights: Sequence[Any], call: int, lr: float | Tensor, follow: int, quorum: float,
                    sizes: str) -> None:
    """A step by rounding of many weights on one device: those of a kind in three launches."""
    kernel, clock, lr = kernels.joint_of(weights[0]), weights[0].ballot, _readable(lr, weights[0])
    assert kernel is not None
    layers = []
    for weight in weights:
        grid, ballot = weight.grid, weight.ballot
        levels, unheard = _pace(weight, quorum)
        worth = rules.worth_of(levels, grid.resolution(follow < rules.FOLLOW_ALL), unheard)
        before = _squares_before(grid, ballot, sizes)
        layers.append(kernel.Layer(
            stored=weight.detach(), votes=ballot.votes, running=before.running, own_size=before.own_size, worth=worth,
            stream=ballot.stream(0, call)["stream"],
            shift=rules.square_shift(ballot.ceiling, grid.rows, grid.columns), quiet=rules.quiet_of(unheard), **grid.form))
    told = kernel.round_together(layers, lr, clip=rules.CLIP, most_halvings=rules.MOST_HALVINGS, follow=follow,
                                 seed=clock.seed, step=clock.step, call=call)
    for weight, (squares, flips) in zip(weights, told, strict=True):
        _keep_squares(weight.grid, weight.ballot, squares, sizes)
        weight.ballot.flips = flips if weight.ballot.flips is None else weight.ballot.flips + flips


def move(weight: Tensor, ballot: Ballot, call: int, *, lr: float | Tensor, rule: str, p_min: float, inertia: float,
         quorum: float, sizes: str) -> None:
    """One step of one stored weight, in place, some rows at a time. How many levels changed is added to ballot.flips."""
    grid: Grid = weight.grid  # type: ignore[attr-defined]
    votes, lr = ballot.votes, _readable(lr, weight)
    assert votes is not None
    if ballot.flips is None:
        ballot.flips = torch.zeros((), dtype=torch.int64, device=weight.device)
    bounds, factors, follow = None, None, rules.follow_of(inertia)
    if rule == "topk":
        # A look at the largest vote would make the host wait for a GPU; a bound on it costs a few passes more instead.
        bounds = rules.topk_bounds(votes, lr, ballot.ceiling if weight.is_cuda else None)
    elif isinstance(lr, Tensor) or lr > 0:
        levels, unheard = _pace(weight, quorum)
        factors, squares = rules.rounding_factors(votes, lr, grid.resolution(follow < rules.FOLLOW_ALL), levels,
                                                  ballot.ceiling, unheard,
                                                  before=_squares_before(grid, ballot, sizes))
        _keep_squares(grid, ballot, squares, sizes)
    if bounds is None and factors is None:
        return
    stream, kernel = ballot.stream(0, call), kernels.twin_of(weight)
    if kernel is not None:
        how = bounds._asdict() | {"p_min": rules.least_chance(p_min)} if bounds else factors._asdict()  # type: ignore[union-attr]
        kernel.move(weight.detach(), votes, grid.columns, ballot.flips, follow=follow, **grid.form, **how, **stream)
        return
    rows_at_once = max(1, AT_ONCE.get(weight.device.type, AT_ONCE["cuda"]) // grid.columns)
    for start in range(0, grid.rows, rows_at_once):
        rows = slice(start, min(start + rows_at_once, grid.rows))
        old = grid.values(weight[rows])
        noise = noise16(old.numel(), **stream, offset=start * grid.columns, device=weight.device).view_as(old)
        if bounds is not None:
            new = rules.topk(old, votes[rows], noise, bounds, p_min, grid.unit, grid.limit, grid.lowest)
        else:
            assert factors is not None
            some = factors._replace(row=factors.row[rows])
            new = rules.rounding(old, votes[rows], noise, some, grid.limit, grid.memory_bits, follow, grid.lowest)
        ballot.flips += (grid.value_levels(new) != grid.value_levels(old)).sum()
        weight[rows] = grid.from_values(new)


def _readable(lr: float | Tensor, weight: Tensor) -> float | Tensor:
    """As a tensor only where a GPU reads it itself."""
    return lr if _on_gpu(lr) and weight.is_cuda else float(lr)


def _pace(weight: Any, quorum: float) -> tuple[float, float]:
    """The rms move of a weight at lr = 1, in levels, and how many rms its votes must exceed to be heard."""
    grid: Grid = weight.grid
    levels = rules.levels_a_step(weight.read_scale(), grid.bits, grid.columns)
    if grid.memory_bits:
        return levels, 0.0
    moved_on = grid.bits + grid.spare_bits  # values are finer than levels where bits are to spare
    return levels * rules.WITHOUT_MEMORY, rules.quorum_of(quorum, moved_on)


def _squares_before(grid: Grid, ballot: Ballot, sizes: str) -> rules.Squares:
    """What past steps say of how loud votes are. Without memory a step as a whole is measured by itself: docs/method.md says
    why."""
    run = _squares_run(grid, sizes)
    return rules.Squares(ballot.votes_square if run else None, ballot.step, own_size=run and not grid.memory_bits)


def _squares_run(grid: Grid, sizes: str) -> bool:
    return grid.memory_bits > 0 or sizes == "running"


def _keep_squares(grid: Grid, ballot: Ballot, squares: Tensor, sizes: str) -> None:
    if _squares_run(grid, sizes):
        ballot.fresh_votes_square = squares


class Hybrid(Optimizer):
    """Several optimizers as one, for schedulers, trainers and loops that take a single optimizer.

    Its `param_groups` are the groups of its parts, the same dicts in the same order, so a scheduler set on it drives
    every part's "lr".
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("Hybrid joins optimizers; give at least one")
        owners: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"Hybrid joins torch optimizers, not {type(optimizer).__name__}")
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if isinstance(getattr(parameter, "grid", None), Grid) and not isinstance(optimizer, GFT):
                    raise ValueError(f"{type(optimizer).__name__} was given a quantized weight, which only gft.GFT can "
                                     "train; give it gft.dense(model) instead of model.parameters()")
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise ValueError(f"{type(owners[id(parameter)]).__name__} and {type(optimizer).__name__} share a "
                                     "parameter; give each parameter to one optimizer")
        # What an Optimizer has beyond its groups (hooks, the profiled step) is set up by its unpickling path.
        self.__setstate__({"defaults": {}, "optimizers": optimizers})

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Quantized weights go to the GFT part, others to the first part that is not one."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        param_group = {**param_group, "params": params}
        first = params[0][1] if isinstance(params[0], tuple) else params[0]
        wants_gft = isinstance(getattr(first, "grid", None), Grid)
        for optimizer in self.optimizers:
            if isinstance(optimizer, GFT) == wants_gft:
                return optimizer.add_param_group(param_group)
        raise ValueError(f"no part of this Hybrid takes {'quantized' if wants_gft else 'dense'} parameters")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:  # before any part has moved
            if isinstance(optimizer, GFT):
                optimizer.check()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        parts = state_dict.get("optimizers")
        if parts is None or len(parts) != len(self.optimizers):
            raise ValueError(f"this state_dict is not of a Hybrid of {len(self.optimizers)} optimizers")
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)
