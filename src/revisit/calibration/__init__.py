"""Choose a floor or a threshold so that a rate of mistakes is promised."""
