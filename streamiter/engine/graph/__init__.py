"""Steps and edges, and what carries records along an edge: outputs, channels, feedback."""
