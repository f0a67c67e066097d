"""Reading and writing the files of benchmarks: data, answers, downloads."""
