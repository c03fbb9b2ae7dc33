"""Runtime: programs on real tensors, the weight store, the compiled module and the engines."""
