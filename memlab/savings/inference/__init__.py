"""Models that only predict: without a graph, smaller, folded."""
