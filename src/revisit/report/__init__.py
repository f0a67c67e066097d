"""Tables, figures and documents made from stored results."""
