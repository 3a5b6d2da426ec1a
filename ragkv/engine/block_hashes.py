"""The names that vLLM will give to the blocks of a prompt, known before it has seen the prompt."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BlockHashes = Callable[[list[int], str | None], list[bytes]]


def block_hashes(config: "VllmConfig") -> BlockHashes:
    """Return what hashes a prompt's full blocks under a salt, as vLLM's own process does with this configuration.

    The hashes are the same on every machine, unless the environment has another PYTHONHASHSEED there.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher, params = get_request_block_hasher(config.cache_config.block_size, hash_function), SamplingParams()

    def hashes(token_ids: list[int], salt: str | None) -> list[bytes]:
        request = Request("", token_ids, params, None, cache_salt=salt, block_hasher=hasher)
        return list(request.block_hashes)

    return hashes
