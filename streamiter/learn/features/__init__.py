"""From records with named fields to rows: ``FeatureHasher``; ``field_values`` is what it makes of single values."""
