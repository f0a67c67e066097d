"""What a decode did, as pages, figures and tables; the check of a text; and the vision-token lens."""
