"""Layers only, no I/O: convolutional blocks, the spectral body, residual vector quantization, losses."""
