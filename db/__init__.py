"""What the service remembers: the SQL models, the states and their legal transitions, and how to reach the database."""
