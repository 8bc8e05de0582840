"""The drop folder: files put into the inbox become jobs, their answers appear in the outbox."""
