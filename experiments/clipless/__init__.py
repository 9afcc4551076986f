"""*DP-SGD Without Clipping: The Lipschitz Neural Network Way*: its figures and tables.

`__main__` holds the figures and commands, `networks` and `training` do one run on images, `spaces`
and `search` choose settings on held-out records, and `table_7` has the tabular data.
"""
