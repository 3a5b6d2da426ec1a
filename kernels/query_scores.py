"""How much the question's tokens attend to each token: the votes of the `query` policy for one layer."""

import torch


def visibility(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
    """Which of the last M tokens a question token can't see: `[Q, M]` bool; every one sees all tokens before these.

    Causal, and `window` tokens back if given; None if all see all. q_positions: `[Q]`; k_positions: `[N]`, any order.
    """
    hidden = k_positions[None, :] > q_positions[:, None]
    if window is not None:
        hidden |= k_positions[None, :] <= q_positions[:, None] - window
    columns = hidden.any(0).nonzero()
    return hidden[:, int(columns[0]) :] if len(columns) else None


def query_scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float, soft_cap: float = 0.0
) -> torch.Tensor:
    """v(t) = Σ_heads Σ_questions softmax_t(q·k / √D), the softmax over every token that the question token sees.

    q: `[Q, Hq, D]`; k: `[Hkv, N, D]`, cached and fresh tokens alike; hidden: `[Q, M]` from `visibility`. Returns `[N]`
    float32. Holds the scores of one KV head at a time, `[Hq/Hkv, Q, N]`.
    """
    num_kv_heads, num_tokens, head_size = k.shape
    grouped = q.view(len(q), num_kv_heads, -1, head_size).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    empty = k.new_zeros(())
    votes = torch.zeros(num_tokens, dtype=torch.float32, device=k.device)
    for head in range(num_kv_heads):
        scores = torch.addmm(empty, grouped[head].reshape(-1, head_size), k[head].T, beta=0, alpha=scale).float()
        if soft_cap:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if hidden is not None:
            scores.view(-1, len(q), num_tokens)[..., num_tokens - hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
        votes += torch.softmax(scores, dim=-1).sum(0)
    return votes
