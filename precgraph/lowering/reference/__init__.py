"""Reference kernels: plain torch, bitwise row-invariant, the oracle of every other backend."""
