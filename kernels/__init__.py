"""Attention and quantisation kernels: one folder an operation, its plain PyTorch reference beside the fast version."""

__version__ = "0.1.0"
