"""The paper's studies: what vision tokens say, what the output distribution keeps, and what each setting is worth."""
