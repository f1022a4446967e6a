"""The command line: files and targets in, text, pictures and JSON out. No arithmetic of bytes."""
