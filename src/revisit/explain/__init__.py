"""The record of a decode, to look at: a page, pictures, a table; and the vision-token lens."""
