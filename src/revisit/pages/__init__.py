"""The HTML pages that this package writes: one template, and the scripts and styles they share."""
