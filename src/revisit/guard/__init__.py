"""Withhold names that the image does not support: lists of names, their support, and the tokens that would write them."""
