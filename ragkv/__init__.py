"""RAG serving on vLLM that reuses every document chunk's KV, wherever the chunk turns up in the prompt."""

__version__ = "0.1.0"
