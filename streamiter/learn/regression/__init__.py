"""``LinearRegression`` and ``LogisticRegression``, and how they are fitted."""
