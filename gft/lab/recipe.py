"""A recipe: one experiment as a typed value that checks itself, in five parts.

    recipe.data        what is learnt, in which batches, and what of it is evaluated
    recipe.model       the network
    recipe.integers    which of its weights are integers, how they are stored, and how they learn
    recipe.dense       how all other parameters learn: AdamW, or another optimizer of floats
    recipe.schedule    for how many steps, and how the learning rates rise and fall

`gft train NAME --set integers.lr=0.2 --set width=64` changes fields of a recipe (`Recipe.changed`).
"""

import dataclasses
import difflib
import math
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from gft.errors import UsageError, shortened
from gft.lab import baselines
from gft.lab import data as datasets
from gft.lab.models.dnn import ACTIVATIONS, NORMS
from gft.lab.models.vit import POSITIONS
from gft.layers import COMPUTE
from gft.optim import LR
from gft.rules import Rounding
from gft.saved import is_number
from gft.storage import HALF

LAYERS = ("none", "hidden", "all", "mlp", "blocks")
MODELS = ("dnn", "gpt", "llama", "vit", "resnet", "cnn")
SEES_IMAGES = ("vit", "resnet", "cnn")
TRANSFORMERS = ("gpt", "llama", "vit")
WITHOUT_DROPOUT = ("llama", "resnet", "cnn")
LENGTHS = ("tokens", "epochs")  # what --set takes for a number of steps
WIDEST, DEEPEST = 2**16, 1000  # a network; more is a slip of the hand, or a config that means to fill the memory


def _choose(part: Any, **choices: Sequence[Any]) -> None:
    for key, allowed in choices.items():
        if getattr(part, key) not in allowed:
            raise UsageError(f"{key}={shortened(getattr(part, key))}: choose one of {', '.join(map(str, allowed))}")


def _at_least(part: Any, **least: float) -> None:
    for key, bound in least.items():
        value = getattr(part, key)
        if value is not None and not value >= bound:
            raise UsageError(f"{key}={shortened(value)}: give at least {bound:g}")


def _shares(part: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(part, key)
        if value is not None and not 0 <= value < 1:
            raise UsageError(f"{key}={shortened(value)}: give a number from 0 up to, but not including, 1")


# ---------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Data:
    """What is learnt: a data set (gft data list), its batches, and how it is evaluated."""

    name: str = "mnist"
    augment: str = "none"  # of the training images (data/augment.py)
    batch: int = 256
    label_smoothing: float = 0.0
    eval_batch: int = 2000
    eval_crop: float = 1.0  # images: the middle of each image that is evaluated, as a share of its side; 1 is all of it
    context: int | None = None  # text: characters or tokens in a sample; None: the data set's own
    vocabulary: int | None = None  # a corpus: tokens that its text is cut into; None: the data set's own
    test: bool = False  # evaluate the test split when the run has ended: what a table reports, never to choose by

    def __post_init__(self) -> None:
        datasets.check(self.name)
        _choose(self, augment=datasets.AUGMENT)
        _at_least(self, batch=1, eval_batch=1, context=1, vocabulary=257)
        _shares(self, "label_smoothing")
        if not 0 < self.eval_crop <= 1:
            raise UsageError(f"eval_crop={self.eval_crop}: a share of an image's side, above 0 and at most 1")


@dataclass(frozen=True)
class Model:
    """The network, before any of its layers is quantized."""

    name: str = "dnn"  # one of MODELS
    width: int = 4096  # resnet, cnn: channels of the first stage
    depth: int = 5  # resnet: blocks a stage; cnn: convolutions
    heads: int = 8  # gpt, llama, vit
    patch: int = 4  # vit
    norm: str = "rms"  # dnn
    activation: str = "relu"  # dnn
    dropout: float = 0.0
    input_dropout: float = 0.0  # dnn
    patch_dropout: float = 0.0  # vit
    positions: str = "random"  # vit
    precision: str = "fp32"  # of the products on a GPU
    compiled: bool = False  # torch.compile, on a GPU: pays off where steps are long or many
    deterministic: bool = False  # on a GPU the same bits each time, by slower kernels; on a CPU they are so anyway
    kv_heads: int | None = None  # llama: heads of keys and values; None: as many as of queries

    def __post_init__(self) -> None:
        _choose(self, name=MODELS, norm=NORMS, activation=tuple(ACTIVATIONS), positions=POSITIONS,
                precision=("fp32", "bf16"))
        _at_least(self, width=1, depth=1, heads=1, patch=1, kv_heads=1)
        if max(self.width, self.heads, self.patch) > WIDEST or self.depth > DEEPEST:
            raise UsageError(f"width={self.width}, depth={self.depth}, heads={self.heads}, patch={self.patch}: give at most "
                             f"{WIDEST}, and a depth of at most {DEEPEST}")
        if self.name in WITHOUT_DROPOUT and self.dropout:
            raise UsageError(f"dropout={self.dropout} would not be used: a {self.name} has none; leave it at 0")
        if self.name != "llama" and self.kv_heads is not None:
            raise UsageError(f"kv_heads={self.kv_heads} would not be used: it needs model=llama; give kv_heads=none")
        _shares(self, "dropout", "input_dropout", "patch_dropout")


@dataclass(frozen=True)
class Integers:
    """Which layers have integer weights, how these are stored, and how they learn: arguments of gft.quantize_ and gft.GFT.

    None leaves a setting to the library, whose defaults depend on the storage. A setting that the chosen rule, vote or
    storage would not use is refused.
    """

    layers: str = "none"  # dnn: hidden (all but the first and last) or all; transformers: mlp or blocks (attention too);
    # resnet, cnn: blocks (all but the first and last) or all
    bits: int = 32
    memory: bool | str = True  # False: packed, nothing but the levels is kept; "half": in half a byte
    init: str = "keep"
    scales: str = "tensor"  # or row, or how many weights of a row share a scale
    gain: bool | None = None  # a number for each layer that AdamW learns; None: as gft.quantize_ gives them
    compute: str | None = None  # in which numbers linear layers multiply: bf16, int8 or fp8; None: as the others
    method: str = "gft"  # or another one (baselines.py), whose lr has a meaning of its own
    lr: float = LR
    rule: str = "rounding"
    vote: str = "int8"
    vote_per: str | None = None  # sign: token or sequence
    literal_mask: bool = False  # sign
    inertia: float | None = None  # rounding with memory
    threshold: float | str | None = None  # rounding: in rms, or auto
    second_moment: str | None = None  # rounding, packed: step or running
    orthogonalize: bool = False  # rounding
    momentum: float = 0.0  # rounding: the share that a running mean of the votes keeps in a step
    momentum_rank: int = 0  # rounding without memory
    own_warmup: int | None = None  # rounding: steps over which these weights' moves grow, whatever the schedule does
    p_min: float | None = None  # topk
    attention_lr: float | None = None  # gpt and vit, blocks: attention's own lr; None: it learns as the others
    attention_inertia: float | None = None  # where it has an lr of its own
    bop_threshold: float = baselines.THRESHOLD  # method bop: in rms of its momentum

    def __post_init__(self) -> None:
        _choose(self, layers=LAYERS, compute=COMPUTE)
        _choose(self, method=("gft", *baselines.METHODS), rule=("rounding", "topk"),
                vote=("int8", "int4", "ternary", "sign"), vote_per=(None, "token", "sequence"),
                second_moment=(None, "step", "running"), init=("keep", "paper", "variance"), memory=(True, False, HALF))
        _at_least(self, lr=0, attention_lr=0, bop_threshold=0)
        Rounding(threshold=self.threshold, momentum=self.momentum, momentum_rank=self.momentum_rank,
                 warmup=self.own_warmup)  # or refuse
        _shares(self, "inertia", "attention_inertia")
        if self.p_min is not None and not 0 <= self.p_min <= 1:
            raise UsageError(f"p_min={shortened(self.p_min)}: a probability lies between 0 and 1")
        if self.layers != "none" and not 2 <= self.bits <= 8:
            raise UsageError(f"bits={shortened(self.bits)}: integer layers have 2 to 8 bits")
        if self.scales not in ("tensor", "row") and not self.scales.isdecimal():
            raise UsageError(f"scales={shortened(self.scales)}: choose tensor, row, or how many weights of a row share a "
                             "scale, as 64")
        if self.layers != "none" and self.method == "gft":
            self._refuse_unused()
        else:
            for key, unused in (("scales", "tensor"), ("compute", None), ("gain", None)):
                value = getattr(self, key)
                if value != unused:
                    raise UsageError(f"integers.{key}={str(value).lower()} would not be used: it needs method=gft and "
                                     f"integer layers; give {key}={str(unused).lower()}")

    def _refuse_unused(self) -> None:
        rounding, packed = self.rule == "rounding", self.memory is not True
        own_attention = self.layers == "blocks" and self.attention_lr is not None
        needs = {
            "inertia": (rounding and not packed, "rule=rounding and memory=true"),
            "threshold": (rounding, "rule=rounding"),
            "second_moment": (rounding and packed, "rule=rounding and memory=false or half"),
            "orthogonalize": (rounding, "rule=rounding"),
            "momentum": (rounding, "rule=rounding"),
            "momentum_rank": (rounding and packed, "rule=rounding and memory=false or half"),
            "own_warmup": (rounding, "rule=rounding"),
            "p_min": (not rounding, "rule=topk"),
            "vote_per": (self.vote == "sign", "vote=sign"),
            "literal_mask": (self.vote == "sign", "vote=sign"),
            "attention_inertia": (rounding and not packed and own_attention, "memory=true and an attention_lr"),
        }
        for key, (used, need) in needs.items():
            if getattr(self, key) not in (None, False) and not used:
                raise UsageError(f"integers.{key}={getattr(self, key)} would not be used: it needs {need}; change that, or "
                                 f"give {key}={'false' if getattr(self, key) is True else 'none'}")


# The paper's own rule from its start, packed and without state, as settings of Integers (gft.PAPER).
PAPERS_RULE: dict[str, Any] = {"memory": False, "init": "paper", "lr": 0.75, "rule": "topk", "p_min": 0.001, "vote": "sign",
                               "vote_per": "sequence"}
# Muon's update of the votes, from a running mean of them: as advised where tokens are many.
MOMENTUM: dict[str, Any] = {"orthogonalize": True, "momentum": 0.9}


@dataclass(frozen=True)
class Dense:
    """How every parameter that is no integer learns: arguments of AdamW, or of SGD, which has momentum 0.9 and Nesterov's
    look ahead. All parameters of a convolutional network decay, gains and biases of its norms too, as in torchvision's
    reference trainings."""

    lr: float = 6e-4
    weight_decay: float = 0.1
    beta2: float = 0.999
    optimizer: str = "adamw"  # or sgd; or muon: the matrices of a transformer's blocks by Muon, on AdamW's lr, all else by
    # AdamW
    clip: float | None = None  # gradients together are made no longer than this; None: left as they are
    blocks: float = 1.0  # llama: the rate of its blocks' matrices, or of the gains of integer ones, as a share of lr;
    # embedding and head often want more

    def __post_init__(self) -> None:
        _choose(self, optimizer=("adamw", "muon", "sgd"))
        _at_least(self, lr=0, weight_decay=0, clip=0, blocks=0)
        _shares(self, "beta2")
        if self.optimizer == "sgd" and self.beta2 != Dense.beta2:
            raise UsageError(f"dense.beta2={self.beta2} would not be used: SGD has no second moment; leave it at "
                             f"{Dense.beta2}, or choose optimizer=adamw")


@dataclass(frozen=True)
class Schedule:
    """For how long, and when to evaluate. Learning rates rise linearly for `warmup` steps, then fall to 0."""

    steps: int = 1960  # 10 epochs of MNIST's 50,000
    warmup: int = 0
    eval_every: int = 0  # steps; 0: once an epoch
    whole_images: float = 0.0  # vit with patch_dropout: the share of the steps, the last ones, that see every patch
    falls: str = "linear"  # or cosine: half a wave
    floats_fall: bool = True  # False: only the integers' rate falls; that of all else stays where warmup has brought it

    def __post_init__(self) -> None:
        _choose(self, falls=("linear", "cosine"))
        _at_least(self, steps=1, warmup=0, eval_every=0)
        _shares(self, "whole_images")


PARTS: dict[str, type] = {"data": Data, "model": Model, "integers": Integers, "dense": Dense, "schedule": Schedule}


# ---------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Recipe:
    """One experiment: which row of which table it is, and everything that decides its outcome but the seed."""

    name: str
    table: str  # of the paper, if any
    row: str
    paper: float | None  # the paper's value
    metric: str = "accuracy"  # in %, or the validation loss in nats
    data: Data = Data()
    model: Model = Model()
    integers: Integers = Integers()
    dense: Dense = Dense()
    schedule: Schedule = Schedule()

    def __post_init__(self) -> None:
        _choose(self, metric=("accuracy", "loss"))
        for key, value, without, models in (("eval_crop", self.data.eval_crop, 1, SEES_IMAGES),
                                            ("whole_images", self.schedule.whole_images, 0, ("vit",))):
            if value != without and self.model.name not in models:
                raise UsageError(f"{key}={value} is for images; leave it at {without} or choose model={' or '.join(models)}")
        if self.dense.optimizer == "muon" and (self.integers.layers != "none" or self.model.name not in TRANSFORMERS):
            raise UsageError("dense.optimizer=muon trains the float matrices of a transformer's blocks, and here are none; "
                             "leave it at adamw")
        if self.dense.blocks != 1 and not self.has_rate_of_blocks:
            raise UsageError(f"dense.blocks={self.dense.blocks} would not be used: it is for the float blocks of a llama, "
                             "or for the gains of its integer ones; leave it at 1")

    @property
    def has_rate_of_blocks(self) -> bool:
        """Do blocks have floats of their own, but for their norms, to which dense.blocks can give another rate? Integer
        layers have gains if asked for, and at 2 bits."""
        integers = self.integers
        gains = integers.gain if integers.gain is not None else integers.bits == 2 and integers.init != "paper"
        return self.model.name == "llama" and (integers.layers == "none" or (integers.method == "gft" and gains))

    def updated(self, **changes: Any) -> "Recipe":
        """A copy with fields changed, those of a part given as a dict: updated(row="mine", integers={"lr": 0.2})."""
        new = {key: dataclasses.replace(getattr(self, key), **value) if key in PARTS else value
               for key, value in changes.items()}
        return dataclasses.replace(self, **new)

    def changed(self, settings: Sequence[str]) -> "Recipe":
        """A copy with each "part.field=value" applied, read as the field's type; the part may be left out where only one has
        such a field, and "data=…" and "model=…" are their names. "tokens=…" is so many tokens of text in all, "epochs=…" so
        many passes over the images: steps, and with them warmup and eval_every in proportion, unless they are set
        themselves."""
        changes: dict[str, dict[str, Any]] = {}
        lengths = [setting for setting in settings if setting.startswith(tuple(f"{key}=" for key in LENGTHS))]
        for setting in (setting for setting in settings if setting not in lengths):
            key, equals, text = setting.partition("=")
            if not equals:
                raise UsageError(f"--set {setting}: write KEY=VALUE, like integers.lr=0.2 or width=64")
            part, field = _place_of(key, setting)
            changes.setdefault(part, {})[field] = _read(text, get_type_hints(PARTS[part])[field], field, setting)
        changed = self.updated(**changes)
        if not lengths:
            return changed
        key, _, text = lengths[-1].partition("=")
        number = _read(text, float, key, lengths[-1])
        schedule = changed.steps_for(number) if key == "tokens" else changed.steps_for_epochs(number)
        return changed.updated(schedule=schedule | changes.get("schedule", {}))

    def steps_for_epochs(self, epochs: float) -> dict[str, int]:
        """The schedule of so many passes over the training images."""
        images = datasets.training_images(self.data.name)
        if images is None:
            raise UsageError(f"epochs={epochs:g} is for images, and data={self.data.name} has none that are counted; set "
                             "steps")
        return self._lasting(max(1, round(epochs * math.ceil(images / self.data.batch))))

    def steps_for(self, tokens: float) -> dict[str, int]:
        """The schedule of so many tokens of text."""
        if self.data.context is None:
            raise UsageError(f"tokens={tokens:g} is for recipes that say how long a sample of their text is; set steps, or "
                             "data.context too")
        return self._lasting(max(1, round(tokens / (self.data.batch * self.data.context))))

    def _lasting(self, steps: int) -> dict[str, int]:
        """The schedule of so many steps, with warmup and evaluations in proportion."""
        share = steps / self.schedule.steps
        return {"steps": steps, "warmup": math.ceil(self.schedule.warmup * share),
                "eval_every": math.ceil(self.schedule.eval_every * share)}

    def config(self) -> dict[str, Any]:
        """The recipe as nested dicts, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Recipe":
        """The recipe that `config` says. A field it lacks, since it is of a time before that field, has its default. It
        comes out of a file, so each value is held to its field's type before anything is reckoned with it."""
        values = _typed(cls, {key: value for key, value in config.items() if key not in PARTS and key != "seed"}, "")
        for part in PARTS.keys() & config.keys():
            if not isinstance(config[part], Mapping):
                raise UsageError(f"the config's {part} is no object of settings; restore config.json, or train anew")
            values[part] = PARTS[part](**_typed(PARTS[part], config[part], f"{part}."))
        if missing := [key for key in ("name", "table", "row", "paper") if key not in values]:
            raise UsageError(f"the config lacks {missing[0]}; restore config.json, or train anew")
        return cls(**values)


def _typed(kind: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values, if each is one of `kind`'s fields and of its type."""
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise UsageError(f"the config has a setting {prefix}{shortened(key)} that this gft does not know; use the gft "
                             "it was made by, or train anew")
        allowed = get_args(hints[key]) or (hints[key],)
        if not any(_is_of(one, value) for one in allowed):
            wanted = " or ".join("none" if one is type(None) else one.__name__ for one in allowed)
            raise UsageError(f"the config's {prefix}{key} should be of type {wanted} and is {shortened(value)}; restore "
                             "config.json, or train anew")
    return dict(values)


def _is_of(kind: type, value: Any) -> bool:
    """As JSON has it: an integer will do for a float, a truth value for neither."""
    if kind in (int, float):
        return is_number(value) and isinstance(value, (int, kind))
    return isinstance(value, kind)


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"integers": {"lr": 0.1}} -> {"integers.lr": 0.1}: a config's values by the names that --set takes."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= {f"{key}.{field}": one for field, one in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


# What a setting counts as in results of a time before it: its default, by which it changed nothing, but for the last.
IN_OLDER = dotted(Recipe("", "", "", None).config()) | {"integers.own_warmup": 0}


# ---------------------------------------------------------------------------------------------------- key=value


def _keys() -> Iterator[tuple[str, str]]:
    for part, kind in PARTS.items():
        yield from ((part, field.name) for field in dataclasses.fields(kind))


def settings_help() -> str:
    """All that --set can change, by part."""
    fields = {part: ", ".join(field for of, field in _keys() if of == part) for part in PARTS}
    return "\n".join(textwrap.fill(names, 78, initial_indent=f"  {part:<10}", subsequent_indent=" " * 12)
                     for part, names in fields.items())


def _place_of(key: str, setting: str) -> tuple[str, str]:
    """Which part and field a key of --set means."""
    places = list(_keys())
    named = [(part, field) for part, field in places if key in (field, f"{part}.{field}") or (key, "name") == (part, field)]
    if len(named) == 1:
        return named[0]
    if named:
        raise UsageError(f"--set {setting}: say which {key} it is, {' or '.join('.'.join(place) for place in named)}")
    part, _, field = key.partition(".")
    if part in PARTS:
        fields = [name for of, name in places if of == part]
        near = difflib.get_close_matches(field, fields, 1, cutoff=0.7)
        mend = f"did you mean {part}.{near[0]}?" if near else f"choose one of {', '.join(fields)}"
        raise UsageError(f"--set {setting}: {part} has no {field!r}; {mend}")
    known = [name for place in places for name in (place[1], ".".join(place))]
    near = difflib.get_close_matches(key, dict.fromkeys(known), 1 if "." in key else 3, cutoff=0.7)
    mend = f"did you mean {' or '.join(near)}?" if near else "gft train --help lists the settings by part"
    raise UsageError(f"--set {setting}: no setting {key!r}; {mend}")


_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _read(text: str, hint: Any, field: str, setting: str) -> Any:
    """The text of a value as the field's type."""
    among = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]
    optional, kinds = type(None) in among, [one for one in among if one is not type(None)]
    if optional and text.lower() == "none":
        return None
    for kind in kinds:  # the first that can read it
        with suppress(KeyError, ValueError):
            return _BOOLS[text.lower()] if kind is bool else kind(text)
    or_none = " or none" if optional else ""
    raise UsageError(f"--set {setting}: {field} takes a value of type {kinds[0].__name__}{or_none}")
