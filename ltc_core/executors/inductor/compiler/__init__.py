"""The compile service: requests, the cache on disk, and the process that compiles."""
