"""Argmin and argmax over one dimension of a tensor of any shape."""
