"""The live view: each watched process publishes its state in a file, and readers show the files."""
