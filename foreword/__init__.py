"""Foreword: read a long document once, keep its KV, answer from it."""

from importlib.metadata import version

__version__ = version("foreword")
