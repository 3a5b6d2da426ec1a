"""Documents cut from the Python manual, which every Python carries."""

import random
from pydoc_data.topics import topics

TITLES = sorted(name for name in topics if len(topics[name]) > 2000)
CHARACTERS = 2500  # of a document: some 600 tokens


def excerpt(title: str, rng: random.Random) -> str:
    """Return some part of a topic, of one document's length."""
    text = topics[title]
    start = rng.randrange(max(1, len(text) - CHARACTERS))
    return text[start : start + CHARACTERS]
