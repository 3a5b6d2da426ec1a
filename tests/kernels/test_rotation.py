import pytest
import torch
from rope_reference import rope, table

from ragkv.kernels.operands import Rotation


@pytest.mark.parametrize("num_tokens", [1, 63, 500])
@pytest.mark.parametrize("head_size, rotated", [(64, 64), (80, 32), (128, 128)])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_shifting_equals_rope_at_the_new_position(num_tokens, head_size, rotated, neox, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, head_size, generator=generator)
    rotation = Rotation.from_table(table(4096, rotated), neox)
    old, new = torch.arange(37, 37 + num_tokens), torch.arange(1200, 1200 + num_tokens)
    for start, end in ((old, new), (new, old)):
        k = rope(x, start, rotated, neox).to(dtype)
        shifted = rotation.rotate(k, int(end[0] - start[0]))
        assert shifted.dtype == dtype
        torch.testing.assert_close(shifted.double(), rope(x, end, rotated, neox), atol=tolerance, rtol=tolerance)


def test_a_table_with_an_attention_scale_only_rotates():
    k = torch.randn(1, 5, 64)
    plain, scaled = (Rotation.from_table(table(256, 64, scale=scale), True) for scale in (1.0, 1.3))
    torch.testing.assert_close(scaled.rotate(k, 100), plain.rotate(k, 100))


def test_non_contiguous_keys():
    k = torch.randn(5, 2, 64).transpose(0, 1)
    rotation = Rotation.from_table(table(256, 64), True)
    torch.testing.assert_close(rotation.rotate(k, 9), rotation.rotate(k.contiguous(), 9))


def test_no_shift_changes_nothing():
    k = torch.randn(2, 5, 64)
    assert torch.equal(Rotation.from_table(table(256, 64), True).rotate(k, 0), k)
