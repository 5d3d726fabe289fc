"""The flights that left New York City in 2013: what the demo learns from."""
