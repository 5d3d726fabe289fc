"""Decision trees, which grow in a loop."""
