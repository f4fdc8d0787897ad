"""Results from before a recipe had parts: their flat settings in today's names and units, so that they still count.

Then: quorum in spacings of the grid that packed weights move on, sizes, directions, sample, mask; today: threshold in rms,
second_moment, orthogonalize, vote_per, literal_mask. Settings that had no effect (inertia without memory, say) are None now.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gft.errors import UsageError

NAMES = {
    "data": {"data": "name", "augment": "augment", "batch": "batch", "label_smoothing": "label_smoothing",
             "eval_batch": "eval_batch", "eval_crop": "eval_crop"},
    "model": {"model": "name", **{key: key for key in (
        "width", "depth", "heads", "patch", "norm", "activation", "dropout", "input_dropout", "patch_dropout", "positions",
        "precision", "compiled")}},
    "integers": {"quantize": "layers", "threshold": "bop_threshold", **{key: key for key in (
        "bits", "memory", "init", "method", "lr", "rule", "vote")}},
    "dense": {"dense_lr": "lr", "weight_decay": "weight_decay", "beta2": "beta2"},
    "schedule": {"steps": "steps", "warmup": "warmup", "eval_every": "eval_every", "whole": "whole_images"},
}
INERTIA, QUORUM, MOST_RMS = 0.9, 1.6, 3.0  # the defaults of then, and the most that a quorum came to
SPACING = {2: 1.2240, 3: 0.3534, 4: 0.3534}  # of the grid that packed weights moved on, in rms; at 3 bits half a level


def is_flat(config: Mapping[str, Any]) -> bool:
    return "quantize" in config


def in_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config as a nested one; a nested one as it is."""
    if not is_flat(config):
        return dict(config)
    with _named():
        own = {key: config[key] for key in ("name", "table", "row", "paper", "metric")}
        parts = {part: {now: config[then] for then, now in names.items() if then in config} for part, names in NAMES.items()}
        parts["integers"] |= _integers(config)
        return {**own, **parts}


def orthogonalizes(config: Mapping[str, Any] | None) -> bool:
    """Did a run orthogonalize its votes? The earliest runs kept no config."""
    if not config:
        return False
    with _named():
        return bool(in_parts(config)["integers"]["orthogonalize"])


@contextmanager
def _named() -> Iterator[None]:
    """Settings come out of a file, which may hold anything."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"the settings (config) of a finished run cannot be read ({type(error).__name__}: {error}); mend "
                         "or delete its line or folder") from error


def _integers(config: Mapping[str, Any]) -> dict[str, Any]:
    rounding, packed = config["rule"] == "rounding", not config["memory"]
    quorum, inertia = config["quorum"], config["inertia"]
    values: dict[str, Any] = {}
    if rounding and packed and quorum != QUORUM:
        values["threshold"] = round(min(quorum * SPACING[config["bits"]], MOST_RMS), 6)
    if rounding and packed and config.get("sizes", "step") != "step":
        values["second_moment"] = config["sizes"]
    if rounding and not packed and inertia != INERTIA:
        values["inertia"] = inertia
    if not rounding:
        values["p_min"] = config["p_min"]
    if config["vote"] == "sign":
        values |= {"vote_per": config["sample"], "literal_mask": config["mask"] == "literal"}
    if config.get("attention_lr"):
        values["attention_lr"] = config["attention_lr"]
    return {**values, "orthogonalize": config.get("directions", "voted") == "even"}
