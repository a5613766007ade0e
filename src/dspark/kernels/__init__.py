"""Compiled CPU kernels: products of few rows with packed weights, a decoder's whole pass. Absent without a compiler."""
