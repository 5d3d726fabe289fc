"""Mean and deviation of each feature: ``StandardScaler``, and ``online_standard_scaler`` around it."""
