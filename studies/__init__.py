"""Our studies beyond the ReVisiT paper, which docs/research reports. Not part of the wheel."""
