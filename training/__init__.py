"""How the embedded models were made: recipes, training, cards. Not part of the wheel."""
