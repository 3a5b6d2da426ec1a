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
    """vLLM has ended, and with it the request in work."""


class StoreError(RagKVError):
    """A store that can't be used: made by another version, or no space left."""


class UnknownDocumentError(StoreError):
    """A name, or a tenant, that no document has."""


class RemoteError(StoreError):
    """A bucket, or shared folder, that can't be reached, or refuses what it is asked for."""


class BusyError(StoreError):
    """Another process is changing the store; try again later."""


class OverloadedError(RagKVError):
    """More requests than can be taken now. retry_after_s: how long to wait before the next try."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(RagKVError):
    """A tenant is over its quota."""


class DeadlineError(RagKVError):
    """An answer that took longer than its timeout."""


class ContextTooLongError(RagKVError):
    """A prompt that doesn't fit into the model's context.

    num_tokens: the length of the question, which can't be shortened; limit: the length that would fit.
    """

    def __init__(self, message: str, num_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.limit = limit
