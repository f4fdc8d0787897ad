"""What C and Python agree on: structs, field by field as in native.c, and the functions' types.

A field has the name of the attribute it is filled from, so a new setting of a storage or a plan is one line here and one
there.
"""

import ctypes
from functools import cache
from typing import Any, TypeVar

from torch import Tensor

from gft.philox import NoiseKey
from gft.storage import Storage

POINTER, INT, LONG, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double
C = TypeVar("C", bound=ctypes.Structure)


class CStorage(ctypes.Structure):
    """How a weight's bytes are read: storage.Storage."""

    _fields_ = [(name, INT) for name in ("memory", "inertia", "field_bits", "low_bits", "largest", "lowest", "limit")]


class CKey(ctypes.Structure):
    """Which random numbers: philox.NoiseKey."""

    _fields_ = [*((name, ctypes.c_uint64) for name in ("seed", "first")),
                *((name, ctypes.c_uint32) for name in ("step", "stream", "call"))]


class CRoundingPlan(ctypes.Structure):
    """How far each weight moves: rounding.RoundingPlan."""

    _fields_ = [("row", POINTER), ("column", POINTER), ("cap", FLOAT), ("threshold_share", FLOAT), ("follow", INT)]


class CTopKPlan(ctypes.Structure):
    """Which weights may move: topk.TopKPlan."""

    _fields_ = [("least", LONG), ("largest", LONG), ("p_min", LONG)]


class CMoments(ctypes.Structure):
    """How second moments are renewed and become factors: rounding.rounding_plan."""

    _fields_ = [("share", DOUBLE), ("size", FLOAT), ("shift", INT), ("rescale_step", INT)]


def filled(kind: type[C], value: Any) -> C:
    """The struct that has the value's attributes; of a tensor its address, or where C takes a number the number in it."""

    def plain(name: str, c_type: Any) -> Any:
        attribute = getattr(value, name)
        if isinstance(attribute, Tensor):
            return attribute.data_ptr() if c_type is POINTER else attribute.item()
        return attribute

    return kind(*(plain(name, c_type) for name, c_type in kind._fields_))  # type: ignore[misc]


@cache
def c_storage(storage: Storage) -> CStorage:
    return filled(CStorage, storage)


def c_key(key: NoiseKey) -> CKey:
    return CKey(key.seed, key.first, int(key.step), key.stream, key.call)


def job(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """What one operation works on: native.c says what each field is."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _each(c_type: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, c_type) for name in names.split()]


QuantizeJob = job("QuantizeJob", *_each(POINTER, "values factor out squares"), *_each(LONG, "columns piece"),
                  *_each(FLOAT, "top largest_squared"), ("key", CKey))
LevelsJob = job("LevelsJob", *_each(POINTER, "stored out"), ("factor", FLOAT), ("columns", LONG), ("bytes", INT),
                ("storage", CStorage))
ToIntJob = job("ToIntJob", ("values", POINTER))
VotesJob = job("VotesJob", *_each(POINTER, "grad x packed votes"), *_each(LONG, "tokens rows columns"))
TokensJob = job("TokensJob", *_each(POINTER, "values by_feature q scale"), ("features", LONG),
                *_each(FLOAT, "largest smallest factor"), ("bytes", INT))
ProductJob = job("ProductJob", *_each(POINTER, "q levels scale by_output packed_levels packed_tokens starts out"),
                 *_each(LONG, "tokens features outputs"), ("bytes", INT))
MeanJob = job("MeanJob", *_each(POINTER, "stored votes scale inverse amax largest_vote moves"),
              *_each(LONG, "columns piece first_row"), ("wide", INT), *_each(FLOAT, "share rest per_move"), ("key", CKey))
SquaresJob = job("SquaresJob", *_each(POINTER, "votes by_row by_column"), *_each(LONG, "columns piece"),
                 *_each(INT, "wide shift"))
MoveJob = job("MoveJob", *_each(POINTER, "stored votes"), ("columns", LONG), ("wide", INT), ("storage", CStorage),
              ("rounding", CRoundingPlan), ("topk", CTopKPlan), ("key", CKey))
Parts = job("Parts", *_each(POINTER, "work job"), *_each(LONG, "rows step next total"))

# Done on ranges of rows, by a job.
WORKS = ("gft_quantize", "gft_levels", "gft_to_int", "gft_pack_x", "gft_votes", "gft_round_tokens", "gft_pack_levels",
         "gft_pack_tokens", "gft_multiply_tokens", "gft_mean_amax", "gft_renew_mean", "gft_squares", "gft_round", "gft_topk")
# name: (result, arguments)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    **{name: (LONG, [POINTER, LONG, LONG]) for name in WORKS},
    "gft_take_parts": (None, [POINTER]),
    "gft_huge_pages": (None, [POINTER, LONG]),
    "gft_panel_columns": (LONG, []),
    "gft_group_tokens": (LONG, []),
    "gft_tile_tokens": (LONG, []),
    "gft_packed_groups": (LONG, [LONG]),
    "gft_factors": (None, [POINTER, POINTER, LONG, LONG, CMoments, POINTER, POINTER, POINTER]),
}
