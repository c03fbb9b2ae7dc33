"""Lowering: which kernel serves which node, on which backend."""
