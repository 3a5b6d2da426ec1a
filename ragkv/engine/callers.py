"""vLLM's own objects, which it doesn't hand to connectors: those whose methods have called us have them."""

import sys
from typing import Any


def caller_with(attribute: str) -> Any:
    """Return the nearest object, among those whose methods have called us, that has an attribute; None if none has."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, attribute):
            return caller
    return None
