"""Labels that come later than their questions: how they are declared, joined with questions, and learned."""
