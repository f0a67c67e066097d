"""ReVisiT's decoding step: the reference, the fast implementations, and the choice between them."""
