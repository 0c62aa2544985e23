"""What all benchmarks use: starting processes on a job, progress, tables, charts."""
