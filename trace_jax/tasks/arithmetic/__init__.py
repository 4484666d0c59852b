"""Arithmetic expression trees that are evaluated one operation a turn with a calculator."""
