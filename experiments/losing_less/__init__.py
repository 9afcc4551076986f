"""*Losing Less: A Loss for Differentially Private Deep Learning*: every figure, and beyond.

`__main__` holds the figures as data, `training` does one run, `recipes` has Tables 5 to 7.
"""
