"""A process of a job: its rank, the job's store, and collectives on the host."""
