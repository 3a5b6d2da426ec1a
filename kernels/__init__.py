"""The operators of fusion, as pure functions of tensors. Each has a folder with its reference (its definition), its
Triton kernel and its bench; `operands` has the types that they share, `native` the operators in C++, and `dispatch`
decides which are used.

Knows nothing about stores, requests or vLLM.
"""
