"""RoPE by its definition."""

import torch


def table(positions, rotated, base=10_000.0, scale=1.0):
    frequencies = base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return (scale * torch.cat([angles.cos(), angles.sin()], -1)).float()


def rope(x, positions, rotated, neox):
    """RoPE by complex numbers, in float64: the definition."""
    frequencies = 10_000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turn = torch.polar(torch.ones(len(positions), rotated // 2, dtype=torch.float64), positions[:, None] * frequencies)
    part = x[..., :rotated].double()
    pairs = torch.stack(part.chunk(2, -1), -1) if neox else part.view(*part.shape[:-1], -1, 2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    flat = torch.cat(turned.unbind(-1), -1) if neox else turned.flatten(-2)
    return torch.cat([flat, x[..., rotated:].double()], -1)
