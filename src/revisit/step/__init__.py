"""ReVisiT's decoding step: the reference, the fast implementations, and the place that chooses between them."""
