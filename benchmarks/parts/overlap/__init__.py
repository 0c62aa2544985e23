"""One microbatch under another: models with experts on paced devices, ranks, records."""
