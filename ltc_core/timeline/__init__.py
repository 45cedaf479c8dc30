"""The timeline of a run, as a trace-event file: slices of threads and lanes, arrows between them, counters."""
