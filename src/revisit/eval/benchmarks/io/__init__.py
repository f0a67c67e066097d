"""The data of benchmarks: where it is, and how it is downloaded."""
