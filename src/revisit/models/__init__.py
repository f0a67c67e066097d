"""Models, their processors and their inputs; nothing heavy is imported here."""

DESCRIBE = "Please describe this image in detail."  # the default question
