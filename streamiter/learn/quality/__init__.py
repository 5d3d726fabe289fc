"""How good predictions are: metrics of a training, and watches that say when its rows or its loss change."""
