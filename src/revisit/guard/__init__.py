"""The promise of a rate of mistakes: what a calibration certified, and whether a call keeps to it."""
