"""What can go wrong, as types. Messages name the value and the remedy; only the CLI and the server translate them."""


class RagKVError(Exception):
    """Base of every error that ragkv raises on purpose."""


class ConfigError(RagKVError):
    """A setting, a policy or a budget that can't be used."""


class DocumentError(RagKVError):
    """A document that can't be indexed: empty, unreadable, binary, or without text."""


class ModelError(RagKVError):
    """A model that is missing, damaged, or can't be loaded."""


class EngineStoppedError(RagKVError):
    """vLLM has ended, with the request that was being worked on."""


class StoreError(RagKVError):
    """A store that can't be used: made by another version, or no space left."""


class BusyError(StoreError):
    """Something else is changing the store; the same can be done later."""


class OverloadedError(RagKVError):
    """More is asked for than can be taken now. retry_after_s: when it may go again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(RagKVError):
    """More than somebody may have of it."""


class DeadlineError(RagKVError):
    """An answer that took longer than it was given."""


class ContextTooLongError(RagKVError):
    """A prompt that doesn't fit into the model's context.

    num_tokens: how long the part is that can't be shortened, the question; limit: how long it may be.
    """

    def __init__(self, message: str, num_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.limit = limit
