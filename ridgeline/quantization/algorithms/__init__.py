"""Which integers stand for the weights of a matrix? Pure functions, one file per method.

All work in float32 on one matrix [O, I] and on what was seen of its inputs; none knows a model.
"""
