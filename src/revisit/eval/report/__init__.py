"""Tables, figures and documents of stored results."""
