"""Training steps of pipelines: models, engines, suites, ranks, records."""
