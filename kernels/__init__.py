"""The operators of fusion, as pure functions of tensors. Each has a folder with its reference (its definition), its
Triton kernel and its bench; `native` has them in C++, `dispatch` decides which are taken.

Knows nothing about stores, requests or vLLM.
"""
