"""What the options of experiments are parsed with. Each raises ValueError for text that isn't what it wants.

Nothing heavy is imported before it is needed: `--help` must be quick.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.evals.arms import Arm
    from ragkv.policies import Policy


def whole_numbers(text: str, least: int = 1) -> tuple[int, ...]:
    """Parse `64,128`. Raises ValueError for what isn't a list of whole numbers of at least `least`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        kind = "positive numbers" if least else "whole numbers"
        raise ValueError(f"{text!r} is not a list of {kind} with commas between")
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Parse `0,0.5`. Raises ValueError for what isn't a list of numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers") from None


def policy(text: str) -> "Policy":
    from ragkv.policies import Policy

    return Policy.parse(text.strip())


def policies(text: str) -> tuple["Policy", ...]:
    return tuple(map(policy, text.split(",")))


def arms(text: str) -> tuple["Arm", ...]:
    from ragkv.evals.arms import Arm

    return tuple(Arm.parse(part.strip()) for part in text.split(","))


def among(*known: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        if unknown := set(found) - set(known):
            raise ValueError(f"{min(unknown)!r} is none of: {', '.join(known)}")
        return found

    return parse


ways = among("load", "recompute", "auto")


def bandwidths(text: str) -> tuple[float | None, ...]:
    return tuple(mib_s or None for mib_s in numbers(text))
