"""`selective_attention`: queries at any positions attend to a paged context, each to the tokens before it."""

import torch

from ragkv.kernels.operands import AttentionSpec, PagedKV

_TILE = 32  # queries that read K and V together: the fastest of 8 to 256 on two cores


def selective_attention_reference(
    q: torch.Tensor, positions: torch.Tensor, kv: PagedKV, spec: AttentionSpec
) -> torch.Tensor:
    """Return o(i) = Σ_n p(i, n) v(n), p = softmax_n(q(i)·k(n) · scale) over the tokens that query i sees; `[Q, Hq, D]`
    float32. The definition, computed in float32.

    q: `[Q, Hq, D]`; positions: `[Q]` int64, sorted; nothing of `kv` after the last position is read.
    """
    end = int(positions[-1]) + 1
    group = q.shape[1] // kv.k.shape[2]
    keys, values = (kv.in_order(x, end).float().repeat_interleave(group, 0) for x in (kv.k, kv.v))  # [Hq, N, D]
    scores = spec.cap_(torch.einsum("qhd,hnd->hqn", q.float(), keys) * spec.scale)
    scores = scores.masked_fill(_hidden(spec, positions, 0, end), -torch.inf)
    return torch.einsum("hqn,hnd->qhd", _softmax(scores, spec), values)


def selective_attention(q: torch.Tensor, positions: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> torch.Tensor:
    """Compute the same in q's type, in tiles of queries: each reads K and V once, up to its last position."""
    out = torch.empty_like(q)
    end = int(positions[-1]) + 1
    k, v = kv.in_order(kv.k, end), kv.in_order(kv.v, end)
    for begin in range(0, len(q), _TILE):
        tile = slice(begin, begin + _TILE)
        lowest, end = int(positions[tile][0]), int(positions[tile][-1]) + 1
        first = 0 if spec.sliding_window is None else max(0, lowest - spec.sliding_window + 1)
        hidden = _hidden(spec, positions[tile], first, end)
        attend = _special if spec.soft_cap or spec.sinks is not None else _plain
        out[tile] = attend(q[tile], k[:, first:end], v[:, first:end], hidden, spec)
    return out


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=~hidden, scale=spec.scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _special(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    num_queries, num_heads, head_size = q.shape
    grouped = q.view(num_queries, len(k), -1, head_size).permute(1, 2, 0, 3)
    rows = grouped.reshape(len(k), -1, head_size)  # [Hkv, G·Q, D]
    scores = spec.cap_(torch.bmm(rows, k.transpose(1, 2)).float().mul_(spec.scale))
    weights = _softmax(scores.view(num_heads, num_queries, -1).masked_fill_(hidden, -torch.inf), spec)
    attended = torch.bmm(weights.reshape(scores.shape).to(v.dtype), v)
    return attended.view(num_heads, num_queries, head_size).transpose(0, 1)


def _softmax(scores: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    if spec.sinks is None:
        return torch.softmax(scores, -1)
    sinks = spec.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]


def _hidden(spec: AttentionSpec, positions: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return spec.hidden(positions, torch.arange(first, end, device=positions.device))
