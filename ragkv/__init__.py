"""RAG serving on vLLM that reuses every document chunk's KV, wherever the chunk turns up in the prompt.

pipeline = await Pipeline.open(load_config())
await pipeline.ingest([Path("docs")])
async for event in pipeline.answer("Which method …?", AnswerOptions(Policy.parse("guided"), top_k=6, max_tokens=128)):
    ...  # Retrieved, Delta …, Answer
await pipeline.close()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragkv.answer import Answer, AnswerOptions
    from ragkv.config import Config
    from ragkv.pipeline import Pipeline
    from ragkv.policies import Policy
    from ragkv.settings import load_config

__version__ = "0.1.0"
__all__ = ["Answer", "AnswerOptions", "Config", "Pipeline", "Policy", "load_config"]

_NAME_TO_MODULE = {
    "Answer": "ragkv.answer",
    "AnswerOptions": "ragkv.answer",
    "Config": "ragkv.config",
    "Pipeline": "ragkv.pipeline",
    "Policy": "ragkv.policies",
    "load_config": "ragkv.settings",
}


def __getattr__(name: str) -> Any:
    """Import a public name with its first use: torch and vLLM take seconds, and `ragkv doctor` needs neither."""
    if name not in _NAME_TO_MODULE:
        raise AttributeError(f"module 'ragkv' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)
