"""*Batch Clipping and Adaptive Layerwise Clipping for DP-SGD*: every figure, and beyond.

`__main__` holds the figures as data, `training` does one run by `recorded_step`, and `accounting`
sets the exact ε of the paper's settings beside its CLT figures.
"""
