"""Packages that are optional: an error that says what to install where one is missing."""

from types import TracebackType


class Extra:
    """`with Extra("bench"): import pyarrow`. Raises `ModuleNotFoundError` with the command that brings it."""

    def __init__(self, name: str) -> None:
        """`name`: of the extra in pyproject.toml."""
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, ModuleNotFoundError):
            message = f"{error.name} is not installed: pip install 'tiered[{self._name}]'"
            raise ModuleNotFoundError(message, name=error.name) from None
