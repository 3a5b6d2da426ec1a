"""How much the question's tokens attend to each token: the votes of the `query` policy for one layer."""

import torch


def query_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int | None = None,
) -> torch.Tensor:
    """v(t) = Σ_heads Σ_questions softmax_t(q·k / √D), the softmax over every token that the question token sees.

    q: `[Q, Hq, D]`; k: `[Hkv, N, D]`, every visible token, in any order; positions: `[Q]` and `[N]`, which decide what
    is visible (causal, and `window` tokens back if given). Returns `[N]` float32.
    """
    num_kv_heads, _, head_size = k.shape
    num_queries = q.shape[0]
    grouped = q.view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    hidden = k_positions[None, :] > q_positions[:, None]  # [Q, N]
    if window is not None:
        hidden |= k_positions[None, :] <= q_positions[:, None] - window
    votes = torch.zeros(k.shape[1], dtype=torch.float32, device=k.device)
    any_hidden = bool(hidden.any())
    for head in range(num_kv_heads):  # one KV head at a time bounds the scores to [G·Q, N]
        scores = (grouped[head].reshape(-1, head_size) @ k[head].T).float() * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if any_hidden:
            scores.view(-1, *hidden.shape).masked_fill_(hidden, -torch.inf)
        votes += torch.softmax(scores, dim=-1).sum(0)
    return votes
