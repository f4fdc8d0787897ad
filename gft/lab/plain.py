"""Text that only shows itself: what comes from files, paths and models is printed, and must not steer the terminal."""

import unicodedata

from gft.errors import one_line

# Control characters (an escape sequence begins with one), and the marks that reorder what stands around them. A lone
# surrogate is what Python makes of a byte in a file's name that is no UTF-8; it cannot be printed at all.
STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
HARMLESS = "\u200c\u200d"  # joiners, which some scripts and emoji need


def printable(text: str, lines: bool = True) -> str:
    r"""The text with whatever would steer a terminal written out, as \x1b. lines: line breaks and tabs stay."""
    if text.isprintable():
        return text
    kept = HARMLESS + ("\n\t" if lines else "")
    return "".join(one if one in kept or unicodedata.category(one) not in STEERING else _written_out(one) for one in text)


def brief(error: BaseException) -> str:
    """What another library says, for a sentence of ours: its first line, cut where it is long."""
    return one_line((str(error).splitlines() or [""])[0] or type(error).__name__)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
