"""A process of a job: its rank, the store of the job, and what processes do together on the host."""
