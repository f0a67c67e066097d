"""The embedded model `tiny`, from scratch."""
