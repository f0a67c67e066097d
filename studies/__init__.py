"""Our own studies, which are not of the ReVisiT paper: what docs/research reports. Not part of the wheel."""
