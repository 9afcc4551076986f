"""The three answers of PyTorch's own modules, one file per kind."""
