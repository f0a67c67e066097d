"""What is read or changed inside a running model."""
