"""Many registrations: on the cores and GPUs of one machine, in job arrays, and on a Ray cluster."""
