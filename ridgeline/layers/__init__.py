"""The layers of a model as plain objects over tensors; `decoder.py` is the loop they share."""
