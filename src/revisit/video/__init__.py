"""Videos as frames with times: sampling, and reading files with PyAV."""
