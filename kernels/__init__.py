"""The operators of fusion, as pure functions of tensors. Each has a folder with its reference (its definition) and
its Triton kernel; `operands` has the types that they share, `native` the operators in C++, and `dispatch` decides which
are used.

Knows nothing about stores, requests or vLLM.
"""
