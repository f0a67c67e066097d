"""The paper's studies: what vision tokens predict, what the output distribution keeps, and the effect of each setting."""
