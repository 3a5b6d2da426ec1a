"""`query_scores`: how much the question's tokens attend to each token of a layer: the votes of the `query` policies."""

import torch

from ragkv.kernels.operands import AttentionSpec


def query_scores_reference(
    q: torch.Tensor, q_positions: torch.Tensor, k: torch.Tensor, k_positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Return v(n) = Σ_heads Σ_questions softmax_n(q·k(n) · scale), over the tokens that the question token sees; `[N]`
    float32. The definition, computed in float32.

    q: `[Q, Hq, D]`; k: `[Hkv, N, D]`, cached and fresh tokens alike, in any order; q_positions: `[Q]`, k_positions:
    `[N]`, int64; every question token sees at least one. The votes leave `spec.sinks` out.
    """
    keys = k.float().repeat_interleave(q.shape[1] // len(k), 0)  # [Hq, N, D]
    scores = spec.cap_(torch.einsum("qhd,hnd->hqn", q.float(), keys) * spec.scale)
    hidden = spec.hidden(q_positions, k_positions)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).sum((0, 1))


def query_scores(
    q: torch.Tensor, q_positions: torch.Tensor, k: torch.Tensor, k_positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Compute the same with products in the tensors' type, one KV head at a time: holds `[Hq/Hkv · Q, N]` float32."""
    num_kv_heads, num_tokens, head_size = k.shape
    grouped = q.view(len(q), num_kv_heads, -1, head_size).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    empty = k.new_zeros(())
    hidden = spec.hidden(q_positions, k_positions)
    columns = hidden.any(0).nonzero().flatten()
    first = int(columns[0]) if len(columns) else num_tokens  # every query sees what is before it
    votes = torch.zeros(num_tokens, dtype=torch.float32, device=k.device)
    for head in range(num_kv_heads):
        scores = torch.addmm(empty, grouped[head].reshape(-1, head_size), k[head].T, beta=0, alpha=spec.scale).float()
        spec.cap_(scores)
        scores.view(-1, len(q), num_tokens)[..., first:].masked_fill_(hidden[:, first:], -torch.inf)
        votes += torch.softmax(scores, dim=-1).sum(0)
    return votes
