import pytest
import torch

from ragkv.kernels.query_scores import query_scores, visibility


def reference(q, k, q_positions, k_positions, scale, soft_cap, window):
    """One query and one head at a time, in float64."""
    votes = torch.zeros(k.shape[1], dtype=torch.float64)
    group = q.shape[1] // k.shape[0]
    for i, at in enumerate(q_positions):
        for head in range(q.shape[1]):
            scores = k[head // group].double() @ q[i, head].double() * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            visible = k_positions <= at
            if window is not None:
                visible &= k_positions > at - window
            votes += torch.softmax(scores.masked_fill(~visible, -torch.inf), 0)
    return votes


@pytest.mark.parametrize("num_kv_heads, group", [(1, 4), (3, 3), (2, 1)])
@pytest.mark.parametrize("soft_cap, window", [(0.0, None), (5.0, None), (0.0, 40)])
def test_equals_the_definition(num_kv_heads, group, soft_cap, window):
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(num_kv_heads, 107, 64, generator=generator)
    q = torch.randn(9, num_kv_heads * group, 64, generator=generator)
    k_positions = torch.randperm(107, generator=generator)
    q_positions = torch.arange(98, 107)
    votes = query_scores(q, k, visibility(q_positions, k_positions, window), 0.125, soft_cap)
    expected = reference(q, k, q_positions, k_positions, 0.125, soft_cap, window)
    torch.testing.assert_close(votes.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(votes.sum(), torch.tensor(9.0 * num_kv_heads * group), atol=1e-3, rtol=0)


def test_nothing_is_hidden_from_questions_behind_everything():
    assert visibility(torch.tensor([9, 10]), torch.arange(9)) is None
    assert visibility(torch.tensor([9, 10]), torch.arange(11)).sum() == 1
