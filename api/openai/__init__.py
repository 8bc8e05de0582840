"""Files and batches as OpenAI's clients know them, at /v1/files and /v1/batches."""
