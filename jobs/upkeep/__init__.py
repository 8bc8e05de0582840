"""Looking after what the service keeps: purging jobs that ended long ago, and checking that what is stored agrees."""
