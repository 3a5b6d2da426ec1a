"""`query_scores`: how much the question's tokens attend to each token; the votes of the `query` policies in a layer."""

import torch


def query_scores_reference(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """v(n) = Σ_heads Σ_questions softmax_n(q·k(n) · scale), over the tokens that the question token sees: those at its
    position and before, and `window` tokens back if given. The definition, in float32.

    q: `[Q, Hq, D]`; k: `[Hkv, N, D]`, cached and fresh tokens alike, in any order; q_positions: `[Q]`, k_positions:
    `[N]`, int64; every question token sees at least one. soft_cap: scores are c·tanh(score / c). Returns `[N]` float32.
    """
    keys = k.float().repeat_interleave(q.shape[1] // len(k), 0)  # [Hq, N, D]
    scores = torch.einsum("qhd,hnd->hqn", q.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    hidden = _hidden(q_positions, k_positions, window)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).sum((0, 1))


def query_scores(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The same with products in the tensors' type, one KV head at a time: holds `[Hq/Hkv · Q, N]` float32."""
    num_kv_heads, num_tokens, head_size = k.shape
    grouped = q.view(len(q), num_kv_heads, -1, head_size).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    empty = k.new_zeros(())
    hidden = _hidden(q_positions, k_positions, window)
    columns = hidden.any(0).nonzero().flatten()
    first = int(columns[0]) if len(columns) else num_tokens  # everybody sees what is before it
    votes = torch.zeros(num_tokens, dtype=torch.float32, device=k.device)
    for head in range(num_kv_heads):
        scores = torch.addmm(empty, grouped[head].reshape(-1, head_size), k[head].T, beta=0, alpha=scale).float()
        if soft_cap:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        scores.view(-1, len(q), num_tokens)[..., first:].masked_fill_(hidden[:, first:], -torch.inf)
        votes += torch.softmax(scores, dim=-1).sum(0)
    return votes


def _hidden(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """`[Q, N]`."""
    hidden = k_positions > q_positions[:, None]
    if window is not None:
        hidden |= k_positions <= q_positions[:, None] - window
    return hidden
