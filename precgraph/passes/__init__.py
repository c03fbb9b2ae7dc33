"""The passes from a traced graph to a lowered program, one file each; :mod:`~precgraph.passes.pipeline` orders them."""
