"""What the engine needs from a model: a forward over any positions of requests' paged KV. `subset` does it with vLLM's.

Everything else in the engine knows the model by this interface only, and so is tested without vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

BeforeLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], bool | None]
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Positions of one request to compute: `token_ids` and sorted `positions` `[T]`, and the request's `block_ids`.

    `rope_offset` is added to the positions that the model sees, and not to those where the KV is written.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    rope_offset: int = 0


class Forward(Protocol):
    """A model with its layers in order, and the paged cache of its KV."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    layers: "list[Attention]"

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Return the slots of `positions` `[T]` in the paged cache: `[T]` int64."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V `[T, Hkv, D]` of one layer into the paged cache."""

    def run(
        self, pieces: Sequence[Piece], before_layer: BeforeLayer | None = None, attend: Attend | None = None
    ) -> None:
        """Compute the pieces in one forward, leaving their KV in the paged cache.

        Every token attends to exactly the tokens before it, in the cache or in this forward.
        `before_layer(layer, q, k, v)` is called before each layer writes its KV and attends, with `[T, H, D]` tensors
        over all pieces; if it returns True, the forward ends there. It ends anyway once the last layer's KV is
        written: nobody needs what would come out of it. `attend(layer, q)`, if given, computes attention `[T, Hq, D]`
        in place of the model's own, over K and V that `before_layer` has put where both find them.
        """

    def logprobs(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Compute the pieces to the end. Returns log-probabilities of what follows each token, `[T, V]` float32."""
