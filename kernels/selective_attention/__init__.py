"""`selective_attention`: queries at any positions attend to a paged context, each to the tokens before it."""

import torch

_TILE = 32  # queries that read K and V together: the fastest of 8 to 256 on two cores


def selective_attention_reference(
    q: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """o(i) = Σ_n p(i, n) v(n), p = softmax_n(q(i)·k(n) · scale) over n ≤ positions(i), and n > positions(i) − window if
    given: the definition, in float32.

    q: `[Q, Hq, D]`; positions: `[Q]` int64, sorted; key_cache, value_cache: `[blocks, block_size, Hkv, D]` by any
    strides; block_table: `[N / block_size]` int64, token n is row n % block_size of block block_table[n // block_size];
    nothing behind the last position is looked at. soft_cap: scores are c·tanh(score / c). sinks: `[Hq]`, one more score
    for each head, of nothing. Returns `[Q, Hq, D]` float32.
    """
    end = int(positions[-1]) + 1
    keys, values = (ordered(cache, block_table, 0, end).float() for cache in (key_cache, value_cache))
    group = q.shape[1] // len(keys)
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))  # [Hq, N, D]
    scores = torch.einsum("qhd,hnd->hqn", q.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~_seen(positions, 0, end, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqn,hnd->qhd", torch.softmax(scores, -1)[..., :end], values)


def selective_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in q's type, in tiles of queries: each reads K and V once, up to its last position."""
    out = torch.empty_like(q)
    end = int(positions[-1]) + 1
    k, v = (ordered(cache, block_table, 0, end) for cache in (key_cache, value_cache))
    for begin in range(0, len(q), _TILE):
        tile = slice(begin, begin + _TILE)
        lowest, end = int(positions[tile][0]), int(positions[tile][-1]) + 1
        first = 0 if window is None else max(0, lowest - window + 1)
        seen = _seen(positions[tile], first, end, window)
        keys, values = k[:, first:end], v[:, first:end]
        if soft_cap or sinks is not None:
            out[tile] = _special(q[tile], keys, values, seen, scale, soft_cap, sinks)
        else:
            out[tile] = _plain(q[tile], keys, values, seen, scale)
    return out


def ordered(cache: torch.Tensor, block_table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The tokens from `first` to `end` of a paged cache in order, `[Hkv, end - first, D]`; of one block, a view."""
    block_size = cache.shape[1]
    if end <= block_size:
        return cache[int(block_table[0]), first:end].transpose(0, 1)
    places = torch.arange(first, end, device=cache.device)
    return cache[block_table[places // block_size], places % block_size].transpose(0, 1)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _special(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_queries, num_heads, head_size = q.shape
    grouped = q.view(num_queries, len(k), -1, head_size).permute(1, 2, 0, 3)
    rows = grouped.reshape(len(k), -1, head_size)  # [Hkv, G·Q, D]
    scores = torch.bmm(rows, k.transpose(1, 2)).float().mul_(scale)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    by_query = scores.view(num_heads, num_queries, -1).masked_fill_(~seen, -torch.inf)
    if sinks is None:
        weights = torch.softmax(by_query, -1)
    else:
        extra = sinks.float()[:, None, None].expand(-1, num_queries, 1)
        weights = torch.softmax(torch.cat([by_query, extra], -1), -1)[..., :-1]
    attended = torch.bmm(weights.reshape(scores.shape).to(v.dtype), v)
    return attended.view(num_heads, num_queries, head_size).transpose(0, 1)


def _seen(positions: torch.Tensor, first: int, end: int, window: int | None) -> torch.Tensor:
    """Which of the tokens from `first` to `end` each query sees: `[Q, end - first]` bool."""
    columns = torch.arange(first, end, device=positions.device)
    seen = columns <= positions[:, None]
    if window is not None:
        seen &= columns > positions[:, None] - window
    return seen
