"""GFT, the optimizer of integer weights: votes come in by backward, a rule moves the weights by them.

    backward             layer.votes += q(grad_output)^T · q(x)                       votes.py
    GFT.step             sum the votes of all ranks                                   distributed.py
      group["rule"].step(weights, lr)  -> moved weights, flips                        rules/
      renew(accumulators)              -> running scales, the next count              votes.py

There is no other state than running scales: one float a feature for x and grad_output, and with memory one for the second
moments of their votes. They live in the layers' accumulators and, for the state_dict, in `optimizer.state`.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gft.distributed import (
    ALONE,
    Ranks,
    all_reduce_votes,
    check_alike,
    fingerprint,
    orthogonalized_over,
    ranks_of,
    renewed_over,
    sum_over,
)
from gft.errors import UsageError, UsageTypeError, shortened
from gft.layers import QuantLayer, layer_of
from gft.philox import NoiseKey
from gft.replay import StepGraph
from gft.rules import Part, Rounding, Rule, TopK, WeightStep
from gft.rules.matrices import BOUND, alike
from gft.rules.mean import NAMES, RunningMean, State
from gft.saved import is_number, mapping, saved_groups, whole_number
from gft.settings import check_choice
from gft.sharding import (
    check_sharding,
    column_sums,
    count_together,
    is_sharded,
    orthogonalized_rows,
    own_rows,
    part_of,
    scatter_of,
)
from gft.state import RUNNING, copied, is_room, read_state, shared_as, taken_mean, with_room
from gft.storage import Storage
from gft.votes import Int8, Sign, Vote, VoteAccumulator, renew

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The paper's algorithm, as docs/paper.md reads it: k = 0.75 falling linearly to 0 (by a scheduler), one vote a sample.
PAPER: Mapping[str, Any] = MappingProxyType({"lr": 0.75, "rule": TopK(p_min=0.001), "vote": Sign(per="sequence")})

LR = 0.2  # unless it is given

SETTINGS = ("lr", "rule", "vote", "seed", "in_backward", "step", "wire")  # of a group
GPU_STEPS_BETWEEN_REPORTS = 100
RENEWAL = 3 << 30  # the calls by which running means draw their noise; moves, and votes on the wire, have smaller ones


class GFT(Optimizer):
    """Trains the integer weights of `gft.quantized(model)` by votes.

    lr: For gft.Rounding the rms move of a weight a step, in levels, for a 4-bit layer of 128 inputs; other bits,
        widths, starts and depths are scaled so that the same lr suits them (rules/rounding.py). At 0 nothing moves; near 1 a
        weight crosses the grid in a few steps and training never settles. Packed weights take half of it. For gft.TopK it is
        the paper's k, the fraction of weights that may move: at 0 none, at 1 all. Let a scheduler bring it to 0 in both.
    rule: how votes move weights: gft.Rounding(…), or the paper's gft.TopK(…). A setting of the rule that a weight could only
        ignore is refused; give weights that need other settings a param group of their own.
    vote: how x and grad_output are quantized: gft.Int8(), Int4(), Ternary() or the paper's Sign(…).
    seed: of all random numbers; equal seeds, votes and steps give equal weights on every device. The layers of a model draw
        numbers of their own, whichever optimizers they go to; two models with one seed draw the same.
    in_backward: True moves each layer's weights as soon as its votes exist, inside backward, and keeps no votes;
        `step` then only counts. Each micro-batch moves the weights by itself. For a single process only.
    process_group: the processes whose votes are summed before weights move. None: torch's default group if there is one,
        else this process alone; False: alone in any case. All ranks then take the same steps, to the same bits, and must
        take equally many. It is kept in no state_dict: what n ranks have saved m can load. In the first step each rank
        still rounds x and grad_output on the scale of its own first batch; from then on they share one.

    A param group may have any of these settings but process_group, and one more where fully_shard has shared its weights
    out: "wire", how votes travel between ranks. "int32" (the default): as they are. "int8": rounded without bias, row by
    row; a quarter of the bytes.
    """

    _process_group: "ProcessGroup | bool | None" = None
    ranks: Ranks = ALONE

    def __init__(self, params: Iterable[Any], lr: float = LR, rule: Rule = Rounding(), vote: Vote = Int8(), *,
                 seed: int = 0, in_backward: bool = False, process_group: "ProcessGroup | bool | None" = None) -> None:
        self._process_group, self.ranks = process_group, ranks_of(process_group)
        self._accumulators: dict[Tensor, VoteAccumulator] = {}  # the votes on each weight, which its layer owns
        self._parts: dict[Tensor, Part] = {}  # of the weights whose rows ranks share out: which are this one's
        self._graph = StepGraph()
        super().__init__(params, {"lr": lr, "rule": rule, "vote": vote, "seed": seed, "in_backward": in_backward, "step": 0,
                                  "wire": "int32"})

    # ------------------------------------------------------------------ which weights, by which settings

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more weights, by settings of their own: {"params": gft.quantized(…), "lr": 0.05}."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        settings = {**self.defaults, **param_group, "params": params, "step": 0}
        weights = [one[1] if isinstance(one, tuple) else one for one in params]
        _refuse_loose_settings(param_group)
        check_settings({**settings, "params": weights}, self.ranks)
        for weight in weights:
            self._check_weight(weight, settings["rule"])
        shared_out = [*self._parts, *filter(is_sharded, weights)]
        for weight in shared_out:
            check_sharding(weight, self.ranks, shared_out[0])
        super().add_param_group(settings)
        self._attach(self.param_groups[-1])
        if self.layers() and all(layer.frozen for layer in self.layers()):
            warnings.warn("all weights given to gft.GFT are frozen, as they were before gft.quantize_ or by requires_grad_; "
                          "call requires_grad_(True) on the layers that are to train", stacklevel=4)

    def _check_weight(self, weight: Any, rule: Rule) -> None:
        """Raise before anything is changed if this is no weight that the rule can train, or another optimizer trains it."""
        if not isinstance(weight, Tensor):
            raise UsageTypeError(f"GFT takes parameters, not {type(weight).__name__}; pass gft.quantized(model)")
        layer = layer_of(weight)
        if layer is None and weight.dtype in (torch.int8, torch.uint8):
            raise UsageError("the layer of this integer weight is gone or has another weight by now; keep the model in a "
                             "variable and pass gft.quantized(model)")
        if layer is None:
            raise UsageTypeError(f"GFT trains quantized weights, but was given a {weight.dtype} tensor of shape "
                                 f"{tuple(weight.shape)}; pass gft.quantized(model), and gft.dense(model) to AdamW")
        if weight.is_meta:
            raise UsageError("a weight to train is on the meta device, without values; load them first, by load_state_dict "
                             "with assign=True or without offloading")
        if weight.is_inference():
            raise UsageError("a weight to train was made in torch.inference_mode, which lets nobody change it outside; "
                             "build and quantize the model outside of it")
        rule.storage_for(layer.storage)
        if self._taken(layer):
            gc.collect()  # a scheduler keeps a deleted optimizer alive until then
            if self._taken(layer):
                raise UsageError(f"this {layer} is trained by another gft.GFT already; put all weights into one optimizer, "
                                 "or call the other's release() first")

    def _taken(self, layer: QuantLayer) -> bool:
        return layer.votes is not None and layer.votes.optimizer() not in (None, self)

    def _attach(self, group: dict[str, Any]) -> None:
        """Give each layer of a group an accumulator for its votes, with what state there is."""
        self._reported = self._unreported = 0
        self._compared = False  # with the other ranks
        new: list[tuple[QuantLayer, Tensor, VoteAccumulator]] = []
        for weight in group["params"]:
            layer = layer_of(weight)
            if layer is None:
                raise UsageError("a deep copy of weights does not know its layers; build a new optimizer from "
                                 "gft.quantized(model) and give it this one's state_dict")
            group["rule"].storage_for(layer.storage)  # raises where a loaded rule cannot train this weight
            votes = VoteAccumulator(group["vote"], group["seed"], self._number(layer, weight))
            votes.layer, votes.optimizer = weakref.ref(layer), weakref.ref(self)
            votes.step, votes.rank, votes.world = group["step"], self.ranks.rank, self.ranks.world
            votes.in_backward, votes.wire, votes.transposed = group["in_backward"], group["wire"], layer.transposed
            if is_sharded(weight):
                votes.scatter, self._parts[weight] = scatter_of(weight), part_of(weight)
            for name in RUNNING:
                if name in self.state[weight] and is_room(self.state[weight][name]):
                    del self.state[weight][name]
                setattr(votes, name, self.state[weight].get(name))
            votes.check_state(layer.inputs, (layer.rows, layer.columns), layer.outputs)
            self._check_mean(weight, layer, group["rule"])
            new.append((layer, weight, votes))
        for layer, weight, votes in new:  # all of them, or none
            layer.votes = self._accumulators[weight] = votes

    def _check_mean(self, weight: Tensor, layer: QuantLayer, rule: Rule) -> None:
        """Keep the running mean of a weight's votes, as a state_dict may have brought it, for a rule that has such a one."""
        state = self.state[weight]
        found = taken_mean(state)
        if rule.running_mean is not None and found:
            rule.running_mean.check(found, layer.rows, layer.columns)
            state.update(found)

    def _number(self, layer: QuantLayer, weight: Tensor) -> int:
        """A layer's number in the random streams: its place in the model; where that is not known, or two models are trained
        together, the next that is free. Saved, so that a resumed run draws the same."""
        state = self.state[weight]
        if "number" not in state:
            taken = {other["number"] for other in self.state.values() if "number" in other}
            first = len(taken) if layer.number is None else layer.number
            state["number"] = next(number for number in range(first, first + len(taken) + 1) if number not in taken)
        return state["number"]

    def check(self, only: Tensor | None = None) -> None:
        """Check the settings, which a scheduler or a user may have changed, and let the weights be stored as the rules need
        them (inside backward `only` the one whose turn it is: the others are still in use). Called before any moves."""
        wanted: list[tuple[QuantLayer, Tensor, Rule, Storage]] = []
        if self._accumulators and not self.layers():
            raise UsageError("the layers whose weights this optimizer trains are gone (the model was deleted, or made float "
                             "by gft.dequantize_); build a new optimizer for what there is now")
        for group in self.param_groups:
            check_settings(group, self.ranks)
            rule = group["rule"]
            for weight in group["params"]:
                votes = self._accumulators[weight]
                if (layer := votes.layer()) is not None and layer.qweight is not weight and weight not in self._parts:
                    raise UsageError(f"the weight of {layer} is another one than this optimizer has, as after "
                                     "load_state_dict(assign=True); build a new optimizer from gft.quantized(model)")
                votes.in_backward, votes.wire = group["in_backward"], group["wire"]
                if votes.prepared_for is not rule and (layer := votes.layer()) is not None:
                    wanted.append((layer, weight, rule, rule.storage_for(layer.storage)))
        for layer, weight, rule, storage in wanted:
            if only is None or weight is only:
                layer.store_as_(storage, own_rows(weight))
                self._accumulators[weight].prepared_for = rule

    def layers(self) -> list[QuantLayer]:
        """The layers whose weights this optimizer trains, as far as they are still there."""
        return [layer for votes in self._accumulators.values() if (layer := votes.layer()) is not None]

    def release(self) -> None:
        """Give the weights free for another optimizer. This one moves nothing any more."""
        for votes in self._accumulators.values():
            layer = votes.layer()
            votes.discard()
            if layer is not None and layer.votes is votes:
                layer.votes = None

    # ------------------------------------------------------------------ a step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the votes cast since the last step."""
        for votes in self._accumulators.values():
            votes.discard()

    @torch.inference_mode(False)  # whose tensors could not be changed in place outside of it
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move the weights by the votes cast since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check()
        self._all_reduce_votes()
        self._graph.take(self._take_step, list(self._accumulators.values()), self.param_groups, self._means())
        self._report_not_finite()
        return loss

    def _take_step(self) -> None:
        for group in self.param_groups:
            accumulators = [self._accumulators[weight] for weight in group["params"]]
            self._move([weight for weight in group["params"] if self._accumulators[weight].votes is not None], group)
            renew(accumulators)
            for weight, votes in zip(group["params"], accumulators, strict=True):
                votes.vote, votes.seed = group["vote"], group["seed"]  # not before: votes were cast by the old ones
                kept = {name: getattr(votes, name) for name in RUNNING}
                self.state[weight].update({name: scale for name, scale in kept.items() if scale is not None})
            self._count_flips(group)
            self._advance(group)

    def _move(self, weights: Sequence[Tensor], group: Mapping[str, Any], call: int = 0, bound: int | None = None) -> None:
        """Move some weights of a group by their votes, which are none where backward has done it. A rule that looks at whole
        matrices takes scratch of their size: weights of one shape then take turns, a few together."""
        rule = group["rule"]
        takes_turns = (rule.running_mean or rule.orthogonalize) and self.ranks.world == 1 and not self._parts
        votes: list[Any] = [self._accumulators[weight].votes for weight in weights]
        for numbers in alike(votes) if takes_turns else [range(len(weights))]:
            self._move_together([weights[number] for number in numbers], group, call, bound)

    def _move_together(self, weights: Sequence[Tensor], group: Mapping[str, Any], call: int, bound: int | None) -> None:
        """Those on one device in one step of the rule."""
        rule = group["rule"]
        votes: list[Any] = [self._accumulators[weight].votes for weight in weights]
        if rule.running_mean is not None:
            bound, votes = BOUND, self._averaged(weights, votes, rule.running_mean, call)
        if rule.orthogonalize:
            bound, votes = BOUND, self._orthogonalized(weights, votes, alone=rule.running_mean is not None)
        by_device: dict[torch.device, list[tuple[VoteAccumulator, WeightStep]]] = {}
        for parameter, beta in zip(weights, votes, strict=True):
            one, part = self._accumulators[parameter], self._parts.get(parameter)
            if (layer := one.layer()) is not None:
                key = self._key(parameter, call, layer.columns)
                weight = WeightStep(own_rows(parameter), beta, one.bound if bound is None else bound, layer.storage,
                                    layer.scale_number(), key, one.second_moment, layer.fan_in, layer.branches or 1, part)
                by_device.setdefault(weight.stored.device, []).append((one, weight))
        for device, some in by_device.items():
            results = rule.step([weight for _, weight in some], self._graph.rate(group, device))
            for (one, _), (flips, second_moment) in zip(some, results, strict=True):
                if flips is not None:
                    one.flips = flips if one.flips is None else one.flips + flips
                one.new_second_moment = second_moment

    def _key(self, weight: Tensor, call: int, columns: int) -> NoiseKey:
        """A weight's random numbers in this step, and which of them are those of this rank's first row."""
        part = self._parts.get(weight)
        return self._accumulators[weight].key(0, call, 0 if part is None else part.first_row * columns)

    def _averaged(self, weights: Sequence[Tensor], votes: Sequence[Tensor], kept: RunningMean, call: int) -> list[Tensor]:
        """What a running mean makes of votes: weights whose rows ranks share out, and all others."""
        means = [self._mean(weight, kept, one.shape[1]) for weight, one in zip(weights, votes, strict=True)]
        keys = [self._key(weight, RENEWAL + call, one.shape[1]) for weight, one in zip(weights, votes, strict=True)]
        whole, parts = self._whole_and_parts(weights)

        def of(numbers: list[int]) -> tuple[list[Tensor], list[State], list[NoiseKey]]:
            return [votes[one] for one in numbers], [means[one] for one in numbers], [keys[one] for one in numbers]

        results = dict(zip(whole, renewed_over(self.ranks, kept, *of(whole)), strict=True))
        if parts:
            take_largest = self._parts[weights[parts[0]]].take_largest
            results |= zip(parts, kept.renew(*of(parts), take_largest), strict=True)
        return [results[number] for number in range(len(weights))]

    def _whole_and_parts(self, weights: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """The numbers of the weights that this rank has whole, and of those of which it has some rows."""
        parts = [number for number, weight in enumerate(weights) if weight in self._parts]
        return [number for number in range(len(weights)) if number not in parts], parts

    def _orthogonalized(self, weights: Sequence[Tensor], votes: Sequence[Tensor], alone: bool) -> list[Tensor]:
        whole, parts = self._whole_and_parts(weights)
        results = dict(zip(whole, orthogonalized_over(self.ranks, [votes[number] for number in whole], alone), strict=True))
        results |= zip(parts, orthogonalized_rows([votes[number] for number in parts],
                                                  [weights[number] for number in parts], alone), strict=True)
        return [results[number] for number in range(len(weights))]

    def _means(self) -> list[Tensor]:
        """All that is kept of running means."""
        return [state[name] for state in self.state.values() for name in NAMES if name in state]

    def _mean(self, weight: Tensor, kept: RunningMean, columns: int) -> State:
        """This rank's rows of the running mean of a weight's votes; a new one where there is none of this kind."""
        state = self.state[weight]
        if not kept.fits(state, weight.shape[0], columns):
            for name in NAMES:
                state.pop(name, None)
            state.update(shared_as(kept.start(len(own_rows(weight)), columns, weight.device), weight, kept))
        return {name: own_rows(state[name]) for name in kept.tensors(weight.shape[0], columns)}

    @torch.no_grad()
    def move_in_backward(self, votes: VoteAccumulator) -> None:
        """Move one weight by the votes of the backward pass that is under way, and drop them."""
        weight, group = next((weight, group) for group in self.param_groups for weight in group["params"]
                             if self._accumulators[weight] is votes)
        self.check(only=weight)
        if weight in self._parts:
            counts = torch.tensor([votes.tokens, votes.samples], device=weight.device)
            sum_over(self.ranks, [counts])
            self._move([weight], group, votes.shared_out - 1, votes.bound_of(*counts.tolist()))  # the host waits for them
        else:
            self._move([weight], group, votes.backwards - 1)
        votes.drop_votes()
        if votes.flips is not None:  # until the step; the scratch it may be a view of should not live as long
            votes.flips = votes.flips.clone()

    def _all_reduce_votes(self) -> None:
        """Take the votes of the other ranks in, if there are any."""
        if ranks_of(self._process_group) != self.ranks:
            raise UsageError("torch.distributed was initialised or ended after this optimizer was made; make gft.GFT after "
                             "init_process_group, or pass process_group=False to train alone")
        if self.ranks.world == 1:
            return
        weights = [weight for weight, votes in self._accumulators.items() if votes.layer() is not None]
        layers = self.layers()
        if not layers:
            raise UsageError("the model whose weights this optimizer trains is gone; keep it in a variable while you train")
        if not self._compared:
            settings = [{key: group[key] for key in self.defaults if key in group} for group in self.param_groups]
            number = fingerprint(layers, [column_sums(weight) for weight in weights], settings)
            check_alike(self.ranks, number, weights[0].device)
            self._compared = True
        all_reduce_votes(layers, [self.state[weight] for weight in weights], self.ranks)

    def _count_flips(self, group: dict[str, Any]) -> None:
        """Take the step's flips over from the accumulators. In place, as all state is renewed: a captured CUDA graph writes
        where it wrote when it was captured. All layers in one launch or two, where there are launches."""
        moved = []
        counted = [weight for weight in group["params"] if self._accumulators[weight].flips is not None]
        count_together([self._accumulators[weight].flips for weight in counted], counted)  # type: ignore[misc]
        for weight in group["params"]:
            state, votes = self.state[weight], self._accumulators[weight]
            if votes.flips is not None:
                for name in ("flips", "last_flips"):
                    if name not in state:  # not setdefault, which would launch a fill each time
                        state[name] = torch.zeros_like(votes.flips)
                moved.append((votes.flips, state["flips"], state["last_flips"]))
            elif "last_flips" in state:
                state["last_flips"].zero_()
            votes.flips = None
        if moved:
            new, so_far, last = (list(each) for each in zip(*moved, strict=True))
            torch._foreach_add_(so_far, new)
            torch._foreach_copy_(last, new)

    def _advance(self, group: dict[str, Any]) -> None:
        """Count a step where its random numbers are drawn: on a GPU in its memory, so that a captured CUDA graph, which runs
        no Python, counts too."""
        clocks: dict[torch.device, int | Tensor] = {}
        for weight in group["params"]:
            votes = self._accumulators[weight]
            if weight.device not in clocks:
                step = votes.step
                if isinstance(step, Tensor) and step.device == weight.device:
                    step.add_(1)
                else:
                    step = int(step) + 1
                    step = torch.tensor(step, device=weight.device) if weight.is_cuda else step
                clocks[weight.device] = step
            votes.step = clocks[weight.device]
        group["step"] = next(iter(clocks.values()), group["step"])

    # ------------------------------------------------------------------ what there is to know

    def _report_not_finite(self) -> None:
        """Warn when more gradients were NaN or inf than at the last look. On a GPU a look waits for it, so it is rare, and
        while a CUDA graph is captured there is none: gft.Captured looks between replays."""
        self._unreported += 1
        on_cpu = all(weight.device.type == "cpu" for weight in self._accumulators)
        if on_cpu or (self._unreported >= GPU_STEPS_BETWEEN_REPORTS and not torch.cuda.is_current_stream_capturing()):
            self.report_not_finite()

    def report_not_finite(self) -> None:
        """Warn if gradients were NaN or inf since the last call."""
        self._unreported = 0
        count = self.not_finite()
        if count > self._reported:
            warnings.warn(f"{count - self._reported} values of grad_output were NaN or inf and cast no vote; lower the "
                          "loss scale or the dense learning rate", stacklevel=5)
        self._reported = count

    def flips(self) -> int:
        """How many times a weight changed its level since the start: the paper's "updates", counted."""
        return int(sum(int(state.get("flips", 0)) for state in self.state.values()))

    def not_finite(self) -> int:
        """How many values of grad_output were NaN or inf and cast no vote since this optimizer was made, on this rank."""
        counts = (votes.not_finite for votes in self._accumulators.values())
        return sum(int(count) for count in counts if count is not None)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """torch's, with plain numbers and strings in the groups: also where a GPU counts the steps, and of the rules.

        Each weight has all that there can be of it, -1 for what there is not yet: torch.distributed.checkpoint reads into
        tensors that are there, and leaves out the others. They are copies: what is read into them is looked at by
        load_state_dict before it counts, and the next step does not change them.
        """
        state = super().state_dict()
        rules = [group["rule"] for group in self.param_groups for _ in group["params"]]
        for number, votes in enumerate(self._accumulators.values()):
            layer = votes.layer()
            if layer is not None:
                state["state"][number] = with_room(copied(state["state"].get(number, {})), layer, rules[number])
        for group in state["param_groups"]:
            group["step"] = int(group["step"])
            group["rule"], group["vote"] = group["rule"].to_dict(), group["vote"].to_dict()
        return state

    @torch.inference_mode(False)  # whose tensors could not be changed in place outside of it
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Nothing is changed if it does not fit."""
        checked = self._read(state_dict)
        before = super().state_dict()
        try:
            super().load_state_dict(checked)
        except UsageError:  # of what a hook has made of it
            super().load_state_dict(before)
            raise

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise unless `load_state_dict` can take this over; changes nothing."""
        self._read(state_dict)

    def _read(self, state_dict: Any) -> dict[str, Any]:
        """A state_dict as torch takes it, its tensors copied, once all of it has been looked at."""
        groups, states, layers = [], {}, []
        for own, saved in saved_groups(self, state_dict):
            group = self._read_group(saved)
            check_settings({**group, "params": own["params"]}, self.ranks)
            groups.append(group)
            for number, weight in zip(group["params"], own["params"], strict=True):
                layer = layer_of(weight)
                if layer is None:
                    raise UsageError("the layers whose weights this optimizer trains are gone; build a new optimizer from "
                                     "gft.quantized(model) and give it this state_dict")
                group["rule"].storage_for(layer.storage)
                layers.append((number, layer, group["rule"]))
        if any(number not in state_dict["state"] for number, _, _ in layers):
            raise UsageError("this optimizer state_dict has no state of some of its weights, which torch's "
                             "set_optimizer_state_dict leaves out where they ask for no gradient; give the optimizer itself "
                             "to torch.distributed.checkpoint (docs/scaling.md)")
        for number, layer, rule in layers:
            states[number] = read_state(mapping(state_dict["state"][number], "the state of a weight"), layer, rule)
        numbers = [state["number"] for state in states.values() if "number" in state]
        if len(set(numbers)) < len(numbers):
            raise UsageError("two weights in the optimizer's state_dict have one number and would draw the same random "
                             "numbers; load a state_dict that is not damaged")
        return {**state_dict, "param_groups": groups, "state": states}

    def _read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(group.get("vote"), (Mapping, Vote)) or not isinstance(group.get("rule"), (Mapping, Rule)):
            raise UsageError("this optimizer state_dict is of a version of gft with other settings, or of another "
                             "optimizer; load the model alone and start a new optimizer")
        rule, vote = group["rule"], group["vote"]
        group = {"wire": self.defaults["wire"], **group,  # of a time when there was no choice of it
                 "rule": rule if isinstance(rule, Rule) else Rule.from_dict(dict(rule)),
                 "vote": vote if isinstance(vote, Vote) else Vote.from_dict(dict(vote))}
        missing = [name for name in SETTINGS if name not in group]
        if missing:
            raise UsageError(f"the optimizer's state_dict has no {missing[0]}; load one that is not damaged")
        whole_number(group["step"], "the step of a param group", 2**32 - 1)
        check_choice("in_backward", group["in_backward"], (False, True))
        if any(not isinstance(key, str) for key in group):
            raise UsageError("a param group in the optimizer's state_dict has settings without a name; load one that is not "
                             "damaged")
        return group

    def __getstate__(self) -> dict[str, Any]:
        """For pickle. A group cannot be pickled: whoever reads this goes on in the default one, or alone if it was alone."""
        return {**super().__getstate__(), "_process_group": False if self._process_group is False else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also the last act of load_state_dict
        self._accumulators, self._parts, self._graph = {}, {}, StepGraph()
        self.ranks = ranks_of(self._process_group)
        for group in self.param_groups:
            group.setdefault("wire", self.defaults["wire"])  # of a time when there was no choice
            check_settings(group, self.ranks)
        for group in self.param_groups:
            self._attach(group)


def _refuse_loose_settings(group: Mapping[str, Any]) -> None:
    """A group may have keys of its own, as labels; but a setting of a rule or a vote beside it would be ignored."""
    for argument, kind in (("rule", Rule), ("vote", Vote)):
        for one in kind.kinds():
            for field in fields(one):
                if field.name in group:
                    raise UsageError(f"{field.name} is a setting of the {argument}, not of a group; give the group "
                                     f"{argument}=gft.{one.__name__}({field.name}={group[field.name]!r})")


def check_settings(group: Mapping[str, Any], ranks: Ranks = ALONE) -> None:
    """Raise a one-sentence error for a setting no rule can work with."""
    rule = Rule.check(group["rule"], "rule")
    Vote.check(group["vote"], "vote")
    lr: Any = group["lr"]
    if not (isinstance(lr, Tensor) and lr.is_cuda):  # to look would make the host wait
        number: Any = float(lr) if is_number(lr) else lr
        rule.check_lr(number)
    seed = group["seed"]
    if isinstance(seed, bool) or not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise UsageError(f"seed={shortened(seed)}: give an integer from 0 to 2^64 - 1")
    check_choice("wire", group["wire"], ("int32", "int8"))
    if group["wire"] == "int8" and not all(map(is_sharded, group["params"])):
        raise UsageError('wire="int8" is for weights that fully_shard has shared out over ranks; leave it out')
    if rule.running_mean is not None and not rule.running_mean.by_rows and any(map(is_sharded, group["params"])):
        raise UsageError(f"{rule.running_mean.setting} looks at whole matrices, and fully_shard has shared their rows out "
                         "over ranks; leave it out")
    if group["in_backward"] and ranks.world > 1 and not all(map(is_sharded, group["params"])):
        raise UsageError("in_backward=True moves a layer before the votes of other ranks are there; leave it out, or pass "
                         "process_group=False to train alone")
