"""The inner loops: each file is a signature, a plain PyTorch reference and the choice between
implementations."""
