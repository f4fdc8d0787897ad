"""Settings that check themselves: the small frozen dataclasses that say how votes are cast and how they move weights.

A setting is written into a state_dict as plain numbers and strings, so nothing needs to be unpickled to read it.
"""

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gft.errors import UsageError, UsageTypeError, one_line, shortened

S = TypeVar("S", bound="Setting")


@dataclass(frozen=True)
class Setting:
    """Base of rules (rules/) and of vote quantizers (votes.py)."""

    def to_dict(self) -> dict[str, Any]:
        """The class's name and its fields, for a state_dict."""
        return {"name": type(self).__name__, **asdict(self)}

    @classmethod
    def from_dict(cls: type[S], saved: dict[str, Any]) -> S:
        """The inverse of `to_dict`, among the subclasses of this class."""
        fields = {str(key): value for key, value in saved.items()}
        name = fields.pop("name", None)
        known = {kind.__name__: kind for kind in cls.kinds()}
        if not isinstance(name, str) or name not in known:
            raise UsageError(f"{shortened(name)} is not a {cls.__name__} this version of gft knows ({', '.join(known)}); "
                             "import the module that defines it first")
        try:
            return known[name](**fields)
        except UsageError:  # a value, of whatever type: its own message names it
            raise
        except TypeError:
            raise UsageError(f"{name} has other settings in this version of gft than in the state_dict "
                             f"({one_line(', '.join(fields))}); make a new optimizer") from None

    @classmethod
    def kinds(cls: type[S]) -> list[type[S]]:
        """All subclasses, of whatever generation."""
        return [kind for child in cls.__subclasses__() for kind in (child, *child.kinds())]

    @classmethod
    def check(cls: type[S], given: Any, argument: str) -> S:
        """`given` if it is a setting of this kind, else an error that names the choices."""
        if isinstance(given, cls) and type(given) is not cls:
            return given
        choices = " or ".join(f"gft.{kind.__name__}()" for kind in cls.kinds() if kind.__module__.startswith("gft."))
        said = repr(given) if isinstance(given, (Setting, type)) else shortened(given)
        raise UsageTypeError(f"{argument}={said}: give {choices}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of the choices, and of its type: 1 is not True."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise UsageError(f"{name}={shortened(value)}: choose one of {', '.join(map(repr, choices))}")


def check_number(name: str, value: Any, least: float, most: float, meaning: str) -> None:
    """Raise unless `value` is a number from least to most (most itself included)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageTypeError(f"{name}={shortened(value)}: {meaning}; give a number from {least:g} to {most:g}")
    if not least <= value <= most:
        said = f"{value:g}" if abs(value) < 1e300 else shortened(value)
        raise UsageError(f"{name}={said}: {meaning}; give a number from {least:g} to {most:g}")


def check_count(name: str, value: Any, least: int, most: int, meaning: str) -> None:
    """Raise unless `value` is a whole number from least to most."""
    check_number(name, value, least, most, meaning)
    if not isinstance(value, int):
        raise UsageTypeError(f"{name}={value}: {meaning}; give a whole number")
