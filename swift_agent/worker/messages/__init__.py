"""Messages of pipelines: counted, logged, received again."""
