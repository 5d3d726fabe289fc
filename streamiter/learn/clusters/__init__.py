"""k-means, on bounded data and on streams."""
